#!/usr/bin/env python3
"""Writes examples/data/rollouts.jsonl: word problems with right and wrong answers. Always the same file.

python tools/make_rollouts.py [PATH]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

RESPONSES = 8
# How often an answer is right. The last group has equal rewards, and so is dropped by DAPO.
RIGHT = {
    "Ada": 0.6,
    "Bruno": 0.4,
    "Chen": 0.8,
    "Dalia": 0.5,
    "Emeka": 0.3,
    "Farah": 0.5,
    "Goran": 0.2,
    "Hina": 1.0,
}

INSTRUCTIONS = """\
Read the notes of a shopkeeper below and answer the question at the end. Work in steps: first write what each
kind of goods brought in, one line each, then add these amounts, then subtract what was spent. Show every
calculation. Finish with a line that holds the word Answer and the number alone, without a currency sign."""
GOODS = ("apples", "loaves", "candles", "notebooks", "tulips", "teapots", "scarves", "lanterns", "kites")
EXPENSES = ("the stall", "a new sign", "paper bags", "the tram", "lunch for two helpers")
TERSE = ("{name}: {count} * {price} = {amount}", "{count} {name} at {price} make {amount}")
CHATTY = (
    "So {count} {name} were sold, and since each cost {price} dollars that is {count} * {price} = {amount}.",
    "Next come the {name}: those that went home brought nothing, the other {count} brought {price} "
    "dollars each, which makes {amount} dollars.",
)


def make_group(keeper: str, rng: random.Random) -> dict:
    sales = [(name, rng.randint(3, 40), rng.randint(2, 15)) for name in rng.sample(GOODS, 3)]
    expenses = [(name, rng.randint(4, 30)) for name in rng.sample(EXPENSES, 2)]
    prompt = question(keeper, sales, expenses, rng)
    responses = [answer(sales, expenses, rng, rng.random() < RIGHT[keeper]) for _ in range(RESPONSES)]
    return {"prompt": prompt, "responses": responses}


def question(keeper: str, sales: list, expenses: list, rng: random.Random) -> str:
    lines = [INSTRUCTIONS, "", f"Notes of {keeper}, market day {rng.randint(1, 60)}:"]
    for name, count, price in sales:
        unsold = rng.randint(1, 25)
        lines.append(
            f"- I brought {count + unsold} {name} and asked {price} dollars for each. In the evening "
            f"{unsold} of the {name} were left, and I took them home again."
        )
    for name, cost in expenses:
        lines.append(f"- I paid {cost} dollars for {name}, in cash, before the market closed.")
    lines += ["", f"How many dollars did {keeper} earn on this day, after all sales and expenses?", ""]
    return "\n".join(lines)


def answer(sales: list, expenses: list, rng: random.Random, right: bool) -> dict:
    """A worked answer. A wrong one has a slip in one of its products and goes on correctly from there."""
    style = rng.choice((TERSE, CHATTY))
    slip_at = None if right else rng.randrange(len(sales))
    lines, total = [], 0
    for index, (name, count, price) in enumerate(sales):
        amount = count * price + (rng.choice((-10, -1, 1, 10)) if index == slip_at else 0)
        total += amount
        lines.append(rng.choice(style).format(name=name, count=count, price=price, amount=amount))
    spent = sum(cost for _, cost in expenses)
    lines.append(f"Spent: {' + '.join(str(cost) for _, cost in expenses)} = {spent}")
    lines.append(f"{total} - {spent} = {total - spent}")
    lines.append(f"Answer {total - spent}")
    return {"text": "\n".join(lines), "reward": 1.0 if right else 0.0}


def main() -> None:
    default = Path(__file__).parent.parent / "examples" / "data" / "rollouts.jsonl"
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    rng = random.Random(2)
    lines = [json.dumps(make_group(keeper, rng)) for keeper in RIGHT]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
