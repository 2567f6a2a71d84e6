"""When does an attention begin to learn ListOps? Short samples, a short training, on a CPU.

    python benchmarks/listops_start.py softmax soft soft:query_gain=1 --csv FILE      minutes for each

You can append options to an attention. Prints the accuracy in % on 400 samples of 200 to 400 tokens during
500 steps with batch 32; the learning rate rises linearly to 1e-3 in 100 steps and then falls linearly.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

from softfree.analysis import describe_environment, write_csv
from softfree.data import listops
from softfree.data.longrange import PackedSequences, PadSequences
from softfree.models.sequence import SequenceClassifier
from softfree.training.classification import parse_model_kwargs

SHORTEST, LONGEST, VOCABULARY, CLASSES = 200, 400, 32, 10
TRAINING, TEST, BATCH = 20_000, 400, 32
STEPS, WARM_UP, EVERY, RATE = 500, 100, 50, 1e-3
pad = PadSequences(LONGEST)


def accuracy(model: SequenceClassifier, batches: list[Any]) -> float:
    model.eval()
    with torch.no_grad():
        hits = sum((model(b.tokens, b.mask).argmax(-1) == b.labels).sum().item() for b in batches)
    model.train()
    return 100 * hits / TEST


def learn(
    attention: str, options: dict[str, Any], seed: int, data: PackedSequences, tests: list[Any]
) -> Iterator[dict[str, object]]:
    """Train; every 50 steps, yield the accuracy and the mean loss since the last time."""
    torch.manual_seed(seed)
    model = SequenceClassifier(VOCABULARY, LONGEST, CLASSES, attention, dropout=0.0, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))
    )
    order = torch.Generator().manual_seed(seed)
    loss_sum = 0.0
    for step in range(1, STEPS + 1):
        chosen = torch.randint(TRAINING, (BATCH,), generator=order).tolist()
        batch = pad([data[index] for index in chosen])
        loss = F.cross_entropy(model(batch.tokens, batch.mask), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        loss_sum += loss.item()
        if step % EVERY == 0:
            yield dict(step=step, accuracy=accuracy(model, tests), loss=loss_sum / EVERY)
            loss_sum = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("attentions", nargs="+", metavar="ATTENTION[:OPTION=VALUE...]")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    samples = listops.generate(
        TEST + TRAINING, rules=listops.ListOpsRules(min_length=SHORTEST, max_length=LONGEST)
    )
    test, training = (
        PackedSequences(part, shift=0, length=LONGEST)
        for part in (samples.cut(0, TEST), samples.cut(TEST, TEST + TRAINING))
    )
    # Samples of similar length next to each other, so that there is little padding.
    by_length = sorted(range(TEST), key=lambda index: len(test[index][0]))
    tests = [pad([test[i] for i in by_length[k : k + 50]]) for k in range(0, TEST, 50)]
    width = max(map(len, given.attentions))
    print(f"{'steps':{width}}  seed", *(f"{step:5}" for step in range(EVERY, STEPS + 1, EVERY)))
    rows: list[dict[str, object]] = []
    for text, seed in itertools.product(given.attentions, given.seeds):
        attention, *options = text.split(":")
        curve = list(learn(attention, parse_model_kwargs(options), seed, training, tests))
        rows += [dict(attention=attention, options=" ".join(options), seed=seed) | p for p in curve]
        print(f"{text:{width}}  {seed:4}", *(f"{p['accuracy']:5.1f}" for p in curve), flush=True)
    if given.csv is not None:
        write_csv(given.csv, rows, describe_environment(torch.device("cpu")))


if __name__ == "__main__":
    main()
