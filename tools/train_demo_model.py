"""Builds the embedded demo model in three stages: `prepare` (tokens), `train` (weights), `report` (card).

    python tools/train_demo_model.py prepare --data DATA --out TOKENS
    python tools/train_demo_model.py train   --data TOKENS --out MODEL --device cuda --minutes 5
    python tools/train_demo_model.py report  --data TOKENS --out MODEL

`--data` of prepare is a folder of *.jsonl.gz files; the other stages read what prepare wrote.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    """The command line of all three stages."""
    parser = argparse.ArgumentParser(description="Build the localmoe demo model.")
    stages = parser.add_subparsers(dest="stage", required=True)
    for name, text in (
        ("prepare", "tokenizer, tokens"),
        ("train", "weights"),
        ("report", "transcripts, model card"),
    ):
        stage = stages.add_parser(name, help=text)
        stage.add_argument("--data", type=Path, required=True, help="folder to read")
        stage.add_argument("--out", type=Path, required=True, help="folder to write")
        stage.add_argument("--device", default="cpu", help="cpu or cuda")
        stage.add_argument("--seed", type=int, default=1)
        if name == "train":
            stage.add_argument(
                "--minutes", type=float, default=5.0, help="wall clock; the schedule anneals within it"
            )
            stage.add_argument(
                "--max-steps", type=int, default=0, help="stop after so many steps (0: by time alone)"
            )
            stage.add_argument("--rows", type=int, default=128, help="sequences a step")
            stage.add_argument("--learning-rate", type=float, default=2e-3)
            stage.add_argument(
                "--held-out-rows", type=int, default=64, help="rows of each group for held-out losses"
            )
            stage.add_argument(
                "--pieces", type=int, default=1, help="split model.safetensors into so many files"
            )
    return parser


def main() -> None:
    """Runs one stage."""
    args = build_parser().parse_args()
    if args.stage == "prepare":
        from demo_data import attribution, load_corpus
        from demo_tokens import prepare

        prepare(load_corpus(args.data, args.seed), args.out)
        (args.out / "ATTRIBUTION.md").write_text(attribution(args.data), encoding="utf-8")
    elif args.stage == "train":
        from demo_train import Recipe, train

        recipe = Recipe(
            minutes=args.minutes,
            max_steps=args.max_steps,
            rows=args.rows,
            learning_rate=args.learning_rate,
            seed=args.seed,
            held_out_rows=args.held_out_rows,
        )
        train(args.data, args.out, args.device, recipe, args.pieces)
    else:
        from demo_report import report

        report(args.data, args.out, args.device)


if __name__ == "__main__":
    main()
