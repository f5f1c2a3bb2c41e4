// The plan of a step's attention: which query tokens meet which KV tiles, shared tiles once.
// The C++ twin of batchinfer/attention/tree.py; see there for the idea.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace batchinfer {

constexpr int TILE = 64, GROUP = 16;

struct RaggedBatch {
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int64_t max_blocks;
  const int32_t* query_starts;  // [num_seqs]
  const int32_t* query_lens;    // [num_seqs]
  int num_seqs, block_size, num_kv_heads;
  int rows_alone;  // units of so many tokens share no loads: they fill the lanes by themselves
};

// Query tokens that meet the same tiles, one after the other.
struct Run {
  int rows_begin, num_rows;    // into Plan::rows
  int num_final;               // the first so many rows meet no tile after this run's
  int tiles_begin, num_tiles;  // into Plan::groups, four entries a tile
  int first_tile;              // absolute number of the first one
  int wave;                    // runs of one wave may go in any order, waves may not
};

struct Plan {
  std::vector<int32_t> rows;       // flat query tokens
  std::vector<int64_t> groups;     // where the K of each 16-token group of kv head 0 lies in the cache, in groups
  std::vector<Run> runs;           // by wave
  std::vector<int32_t> positions;  // of every query token
  int num_tokens = 0, num_waves = 0;

  // The plan of these query tokens alone, ascending.
  Plan only(const int64_t* wanted, int num_wanted) const {
    Plan out;
    out.groups = groups, out.positions = positions, out.num_tokens = num_tokens, out.num_waves = num_waves;
    std::vector<uint8_t> is_wanted(num_tokens, 0);
    for (int i = 0; i < num_wanted; i++) is_wanted[wanted[i]] = 1;
    for (Run run : runs) {
      const int begin = run.rows_begin, end = begin + run.num_rows, final = begin + run.num_final;
      run.rows_begin = (int)out.rows.size(), run.num_final = 0;
      for (int i = begin; i < end; i++) {
        if (!is_wanted[rows[i]]) continue;
        out.rows.push_back(rows[i]);
        if (i < final) run.num_final++;
      }
      run.num_rows = (int)out.rows.size() - run.rows_begin;
      if (run.num_rows) out.runs.push_back(run);
    }
    return out;
  }
};

// Query tokens of one sequence within one tile: all of them see tiles [low, high].
struct Unit {
  int seq, first_row, count, low, high, position;
};

class Planner {
 public:
  Planner(const RaggedBatch& batch, int window, Plan& plan) : batch_(batch), plan_(plan) {
    int row = 0;
    for (int s = 0; s < batch.num_seqs; s++) {
      int begin = batch.query_starts[s], end = begin + batch.query_lens[s];
      for (int p = begin; p < end; p++) plan.positions.push_back(p);
      for (int p = begin; p < end;) {
        int next = std::min(end, (p / TILE + 1) * TILE);
        int low = window > 0 ? std::max(0, p - window + 1) / TILE : 0;
        units_.push_back({s, row, next - p, low, p / TILE, p});
        if (next - p >= batch.rows_alone) {
          emit(units_.size() - 1, units_.size(), low, p / TILE + 1, 0);
          units_.pop_back();
        }
        row += next - p;
        p = next;
      }
    }
    plan.num_tokens = row;
    std::stable_sort(units_.begin(), units_.end(), [this](const Unit& a, const Unit& b) {
      if (a.low != b.low) return a.low < b.low;
      int last = std::min(a.high, b.high);
      for (int tile = a.low; tile <= last; tile++)
        if (int order = compare(a, b, tile)) return order < 0;
      return a.high < b.high;
    });
    for (size_t begin = 0, end; begin < units_.size(); begin = end) {
      end = begin + 1;
      while (end < units_.size() && units_[end].low == units_[begin].low && !compare(units_[begin], units_[end], units_[begin].low)) end++;
      descend(begin, end, units_[begin].low, 0);
    }
    // The longest first: what is left for the end of a wave is short.
    std::stable_sort(plan.runs.begin(), plan.runs.end(), [](const Run& a, const Run& b) {
      return a.wave != b.wave ? a.wave < b.wave : a.num_tiles > b.num_tiles;
    });
    plan.num_waves = plan.runs.empty() ? 0 : plan.runs.back().wave + 1;
  }

 private:
  // Units [begin, end) share their tiles up to `tile`, and tile `tile` too.
  void descend(size_t begin, size_t end, int tile, int wave) {
    const Unit &first = units_[begin], &last = units_[end - 1];
    int stop = tile + 1;  // sorted: what the first and the last share, all share; the shortest comes first
    while (stop <= std::min(first.high, last.high) && !compare(first, last, stop)) stop++;
    emit(begin, end, tile, stop, wave);
    while (begin < end && units_[begin].high < stop) begin++;
    for (size_t next; begin < end; begin = next) {
      next = begin + 1;
      while (next < end && !compare(units_[begin], units_[next], stop)) next++;
      descend(begin, next, stop, wave + 1);
    }
  }

  void emit(size_t begin, size_t end, int tile, int stop, int wave) {
    Run run{(int)plan_.rows.size(), 0, 0, (int)plan_.groups.size() / 4, stop - tile, tile, wave};
    for (size_t u = begin; u < end; u++) {
      const Unit& unit = units_[u];
      for (int i = 0; i < unit.count; i++) plan_.rows.push_back(unit.first_row + i);
      run.num_rows += unit.count;
      if (unit.high < stop) run.num_final = run.num_rows;  // sorted: these come first
    }
    for (int t = tile; t < stop; t++)
      for (int g = 0; g < TILE / GROUP; g++) {
        const int per_block = batch_.block_size / GROUP;
        const int64_t at = group(units_[begin], t * (TILE / GROUP) + g), block = at / per_block;
        plan_.groups.push_back(block * 2 * batch_.num_kv_heads * per_block + at % per_block);
      }
    plan_.runs.push_back(run);
  }

  // Groups behind the sequence's last block repeat that block: their keys are masked.
  int64_t group(const Unit& unit, int index) const {
    int per_block = batch_.block_size / GROUP;
    int block = std::min(index / per_block, last_block(unit));
    return (int64_t)batch_.block_tables[unit.seq * batch_.max_blocks + block] * per_block + index % per_block;
  }
  int last_block(const Unit& unit) const {
    return (batch_.query_starts[unit.seq] + batch_.query_lens[unit.seq] - 1) / batch_.block_size;
  }
  int compare(const Unit& a, const Unit& b, int tile) const {
    if (a.seq == b.seq) return 0;
    int step = std::min(batch_.block_size, TILE) / GROUP;
    for (int g = 0; g < TILE / GROUP; g += step) {
      int64_t x = group(a, tile * (TILE / GROUP) + g), y = group(b, tile * (TILE / GROUP) + g);
      if (x != y) return x < y ? -1 : 1;
    }
    return 0;
  }

  const RaggedBatch& batch_;
  Plan& plan_;
  std::vector<Unit> units_;
};

}  // namespace batchinfer
