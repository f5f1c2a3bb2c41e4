"""Whether a run's tokens are draws from its model's own distribution: estimates from sampled tokens rest on that."""

from __future__ import annotations

from batchinfer.evals.rows import PairedRows, Side

#: Parameters under which they are. With temperature 0 a run is greedy, whatever the others are.
PLAIN_SAMPLING = {
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}


def sampling_warning(pairs: PairedRows) -> tuple[str, ...]:
    """At most one. Of runs that do not say their parameters nothing is said."""
    sides = (("before", _not_plain(pairs.before)), ("after", _not_plain(pairs.after)))
    said = [
        f"{name} with {', '.join(f'{param} {value}' for param, value in params.items())}"
        for name, params in sides
        if params
    ]
    if not said:
        return ()
    return (
        f"The tokens are no draws from the models' own distributions ({'; '.join(said)}): kl_k1, kl_k3 and the "
        "importance ratios describe these tokens and are no estimates; kl itself is exact at each token",
    )


def _not_plain(side: Side) -> dict[str, str]:
    said = {name: side.run.params[name] for name in PLAIN_SAMPLING if name in side.run.params}
    found = {
        name: "by row" if param.get("origin") == "row" else f"{param.get('value'):g}"
        for name, param in said.items()
        if param.get("origin") == "row" or param.get("value") != PLAIN_SAMPLING[name]
    }
    return {"temperature": "0"} if found.get("temperature") == "0" else found
