"""Make prompts to measure with, from real data: text with the chat template applied, in columns `id` and `prompt`.

    python recipes/bench/workload.py bbh_cot.parquet shared.parquet --rows 400
    python recipes/bench/workload.py gsm8k_chat.parquet plain.parquet --rows 256
    python recipes/bench/workload.py bbh_cot.parquet long.parquet --rows 20 --shared-tokens 6000

SOURCE has a column `prompt` (text) or `messages` (chats), and may have one that names the rows. Rows are taken at
even distances over the whole file. With --shared-tokens all prompts begin with one text of that many tokens, made of
prompts of SOURCE one after the other (few-shot examples with their solutions), and go on with the last paragraph of
their own row, its question. Prints how many tokens there are and how many are unique.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchinfer.models.tokenizer import Tokenizer

_BREAK = "\n\n"


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse(arguments)
    import pyarrow as pa
    import pyarrow.parquet as pq

    from batchinfer.models.source import resolve_model
    from batchinfer.planner.prefix_tree import build_prefix_tree

    source = resolve_model(args.model)
    texts, ids = read(args.source, source.tokenizer)
    if len(texts) < args.rows:
        raise SystemExit(f"{args.source} has {len(texts)} rows with a prompt, --rows asks for {args.rows}")
    chosen = evenly(len(texts), args.rows)
    if args.shared_tokens:
        shared = shared_text(texts, source.tokenizer, args.shared_tokens)
        prompts = [shared + _BREAK + question(texts[row]) for row in chosen]
    else:
        prompts = [texts[row] for row in chosen]
    tree = build_prefix_tree(source.tokenizer.encode_batch(prompts))
    longest = int((tree.end[tree.node_of_row]).max())
    if longest >= source.spec.max_position:
        raise SystemExit(f"the longest prompt has {longest} tokens, {args.model} takes {source.spec.max_position - 1}")
    pq.write_table(pa.table({"id": [ids[row] for row in chosen], "prompt": prompts}), args.out)
    print(
        f"{args.out}: {tree.num_rows:,} prompts, {tree.num_tokens:,} tokens, {tree.num_unique_tokens:,} unique, "
        f"the longest {longest:,}"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--shared-tokens", type=int, default=0, help="of the text that all begin with; default: none")
    parser.add_argument("--model", default="smollm2-135m", help="its tokenizer and template (default: %(default)s)")
    args = parser.parse_args(arguments)
    if args.rows < 1 or args.shared_tokens < 0:
        parser.error("--rows must be at least 1 and --shared-tokens not negative")
    if not args.source.is_file():
        parser.error(f"{args.source}: there is no such file")
    return args


def read(path: Path, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Texts of the rows that have one, and their ids, which are places where no column names them."""
    import pyarrow.parquet as pq

    names = pq.read_schema(path).names
    column = next((name for name in ("prompt", "messages") if name in names), None)
    if column is None:
        raise SystemExit(f"{path} has neither a column prompt nor messages, but {', '.join(names)}")
    id_column = next((name for name in ("id", "custom_id") if name in names), None)
    table = pq.read_table(path, columns=[column, *filter(None, [id_column])])
    values: list[Any] = table[column].to_pylist()
    ids = [str(id) for id in table[id_column].to_pylist()] if id_column else [str(row) for row in range(len(values))]
    texts = [value if column == "prompt" or not value else tokenizer.render_chat(value) for value in values]
    kept = [row for row, text in enumerate(texts) if text]
    return [texts[row] for row in kept], [ids[row] for row in kept]


def evenly(total: int, count: int) -> list[int]:
    """`count` different places of `total`, at even distances."""
    return [place * total // count for place in range(count)]


def shared_text(texts: Sequence[str], tokenizer: Tokenizer, num_tokens: int) -> str:
    """Prompts of the source, far from each other, one after the other, cut after `num_tokens`."""
    joined = ""
    for row in evenly(len(texts), min(len(texts), num_tokens)):
        joined += (_BREAK if joined else "") + texts[row]
        ids = tokenizer.encode_batch([joined])[0]
        if len(ids) >= num_tokens:
            return tokenizer.decode(ids[:num_tokens].tolist())
    raise SystemExit(f"the prompts together have fewer than --shared-tokens {num_tokens} tokens")


def question(text: str) -> str:
    """What comes after the last paragraph break."""
    return text.strip().rsplit(_BREAK, 1)[-1]


if __name__ == "__main__":
    main()
