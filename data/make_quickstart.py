"""Makes data/quickstart.parquet and data/quickstart_chat.parquet. Run it from anywhere: no arguments, no chance.

Six families of prompts; those of a family share a few-shot prefix and differ in the last question.
Four are written out in quickstart/*.toml, two are made here: in `arithmetic` the answers are
computed, and in `extraction` text and JSON are built from the same values.

quickstart.parquet:      id string, family string, prompt string, reference string
quickstart_chat.parquet: id string, family string, messages list<struct<role, content>>, reference string
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

DATA_DIR = Path(__file__).resolve().parent
WRITTEN = ("classification", "rewriting", "passage_qa", "code_explanation")
NUM_MADE = 42  # prompts of each family made here

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
SCHEMA = pa.schema([("id", pa.string()), ("family", pa.string()), ("prompt", pa.string()), ("reference", pa.string())])
CHAT_SCHEMA = SCHEMA.set(2, pa.field("messages", pa.list_(MESSAGE)))


@dataclass(frozen=True)
class Family:
    """Pairs of question and answer under one instruction; `input` and `output` are what the pairs are headed with."""

    name: str
    instruction: str
    input: str
    output: str
    examples: list[tuple[str, str]]
    items: list[tuple[str, str]]

    def prompt(self, question: str) -> str:
        shots = [f"{self._ask(q)} {a}" if "\n" not in q else f"{self._ask(q)}\n{a}" for q, a in self.examples]
        return "\n\n".join([self.instruction, *shots, self._ask(question)])

    def _ask(self, question: str) -> str:
        gap = "\n" if "\n" in question else " "
        return f"{self.input}:{gap}{question}\n{self.output}:"

    def messages(self, question: str) -> list[dict[str, str]]:
        turns = [{"role": "system", "content": self.instruction}]
        for asked, answered in self.examples:
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*turns, {"role": "user", "content": question}]


def read_family(name: str) -> Family:
    table = tomllib.loads((DATA_DIR / "quickstart" / f"{name}.toml").read_text(encoding="utf-8"))
    pairs = {key: [(q, a) for q, a in table[key]] for key in ("examples", "items")}
    return Family(name, table["instruction"].strip(), table["input"], table["output"], **pairs)


# Word problems: (text, expression) from a name, a thing and three numbers. No template can go below zero.
Problem = Callable[[str, str, int, int, int], tuple[str, str]]

PROBLEMS: tuple[Problem, ...] = (
    lambda name, thing, a, b, c: (
        f"{name} buys {a} boxes of {thing} with {b + c} in each box and gives away {c}. How many {thing} are left?",
        f"{a} * {b + c} - {c}",
    ),
    lambda name, thing, a, b, c: (
        f"A shelf holds {a * b} {thing}. {name} spreads them evenly over {a} baskets and then puts {c} more "
        f"into one of the baskets. How many {thing} are in that basket?",
        f"{a * b} / {a} + {c}",
    ),
    lambda name, thing, a, b, c: (
        f"{name} sells {a} {thing} on Monday, {b} on Tuesday and twice as many as on Tuesday on Wednesday. "
        f"How many {thing} is that in the three days?",
        f"{a} + {b} + 2 * {b}",
    ),
    lambda name, thing, a, b, c: (
        f"One crate of {thing} weighs {b} kilograms and the empty cart weighs {c}. "
        f"{name} loads {a} crates. What do the cart and the crates weigh together, in kilograms?",
        f"{a} * {b} + {c}",
    ),
    lambda name, thing, a, b, c: (
        f"{name} needs {a * b + c} {thing} and has {c}. They come in packs of {b}. How many packs must {name} order?",
        f"({a * b + c} - {c}) / {b}",
    ),
    lambda name, thing, a, b, c: (
        f"A hall has {a} rows of {b} seats, and {c} of all the seats are broken. {name} lays 3 {thing} on every seat "
        f"that is not broken. How many {thing} does {name} need?",
        f"({a} * {b} - {c}) * 3",
    ),
    lambda name, thing, a, b, c: (
        f"{name} packs {b} {thing} an hour, and a machine packs {c} more than that each hour. "
        f"How many {thing} do both pack together in {a} hours?",
        f"{a} * ({b} + {b} + {c})",
    ),
)
NAMES = ("Amara", "Bence", "Chiara", "Dmitri", "Esi", "Farid", "Greta", "Hiro", "Ines", "Jamal", "Katya")
THINGS = ("lemons", "candles", "notebooks", "bricks", "tulips", "bolts", "postcards", "buttons", "eggs", "maps")


def arithmetic() -> Family:
    """The answer is the working: an expression over the numbers of the text, and its value."""

    def problem(i: int, a: int, b: int, c: int) -> tuple[str, str]:
        name, thing = NAMES[i % len(NAMES)], THINGS[(3 * i + i // 7) % len(THINGS)]
        text, expression = PROBLEMS[i % len(PROBLEMS)](name, thing, a, b, c)
        value = eval(expression, {"__builtins__": {}})  # of the templates above, nobody's input
        return text, f"{expression} = {value:g}"

    return Family(
        name="arithmetic",
        instruction=(
            "Solve each word problem. Answer with the calculation and its result on one line, and with nothing else. "
            "Write whole numbers without commas and without units."
        ),
        input="Problem",
        output="Calculation",
        examples=[problem(i, 3 + i, 12 + 5 * i, 2 + i) for i in range(len(PROBLEMS))],
        items=[problem(i, 4 + (5 * i) % 9, 15 + (11 * i) % 37, 3 + (7 * i) % 11) for i in range(7, 7 + NUM_MADE)],
    )


CUSTOMERS = ("Noor Haddad", "Piet de Vries", "Lucia Ferro", "Tomas Novak", "Aiko Mori", "Sean Byrne", "Wanda Zielinska")
CITIES = ("Porto", "Bergen", "Lyon", "Gdansk", "Ghent", "Trieste", "Tartu", "Cork", "Malmo", "Brno", "Split")
PRODUCTS = (
    "desk lamp",
    "wool blanket",
    "teapot",
    "garden chair",
    "wall clock",
    "bread knife",
    "rain barrel",
    "bookend",
)
MONTHS = ("January", "March", "April", "June", "August", "September", "November")

# `{day} {month}` stands for the due date; every field is in every text.
ORDER_TEXTS = (
    "Hello, {customer} here. Please send {quantity} x {product} to our shop in {city}, to arrive by {day} {month}.",
    "As agreed on the phone I order the {product}, {quantity} pieces, due {day} {month}. Ship to {city}. {customer}",
    "{customer} from {city} called: wants the {product}, {quantity} pieces, and needs them by {day} {month}.",
    "Following up on my mail of last week: make it {quantity} instead of the sample, the {product} we spoke of, "
    "delivered to {city} no later than {day} {month}. Regards, {customer}",
    "Order for {city}, latest date {day} {month}: {quantity} times {product}. The name on the bill is {customer}.",
    "Is the {product} in stock? If so, I, {customer}, take {quantity}. My address in {city} has not changed, "
    "and I need everything on {day} {month}.",
)


def extraction() -> Family:
    """Orders in free text; the answer is a JSON object with the keys named in the instruction."""

    def order(i: int) -> tuple[str, str]:
        values: dict[str, str | int] = {
            "customer": CUSTOMERS[i % len(CUSTOMERS)],
            "product": PRODUCTS[(3 * i) % len(PRODUCTS)],
            "quantity": 2 + (17 * i) % 59,
            "city": CITIES[(4 * i) % len(CITIES)],
        }
        day, month = 1 + (13 * i) % 28, MONTHS[(5 * i + i // 7) % len(MONTHS)]
        text = ORDER_TEXTS[i % len(ORDER_TEXTS)].format(day=day, month=month, **values)
        return text, json.dumps({**values, "due": f"{day} {month}"})

    num_examples = 5
    return Family(
        name="extraction",
        instruction=(
            "Read each order and write it as one line of JSON with the keys customer (name), product (singular), "
            "quantity (number), city (where it is sent) and due (day and month). Write nothing but the JSON."
        ),
        input="Order",
        output="JSON",
        examples=[order(i) for i in range(num_examples)],
        items=[order(i) for i in range(num_examples, num_examples + NUM_MADE)],
    )


def families() -> list[Family]:
    return [*map(read_family, WRITTEN), arithmetic(), extraction()]


def tables() -> tuple[pa.Table, pa.Table]:
    """(quickstart, quickstart_chat): the same rows, as text and as messages."""
    rows, chat_rows = [], []
    items = [(i, family, *item) for family in families() for i, item in enumerate(family.items)]
    # The families take turns, so that the first rows show all of them and input order is not the best order.
    for i, family, question, reference in sorted(items, key=lambda item: item[0]):
        row = {"id": f"{family.name}-{i:03d}", "family": family.name, "reference": reference}
        rows.append({**row, "prompt": family.prompt(question)})
        chat_rows.append({**row, "messages": family.messages(question)})
    return pa.Table.from_pylist(rows, schema=SCHEMA), pa.Table.from_pylist(chat_rows, schema=CHAT_SCHEMA)


def main() -> None:
    for name, table in zip(("quickstart", "quickstart_chat"), tables(), strict=True):
        path = DATA_DIR / f"{name}.parquet"
        pq.write_table(table, path, compression="zstd")
        print(f"{path.name}: {table.num_rows} rows, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
