"""What a measured number names."""

import csv
import datetime

import torch

from softfree.analysis import describe_environment, write_csv
from softfree.analysis.environment import cpu_name


def test_environment_names_date_device_and_versions():
    before = datetime.date.today()
    found = describe_environment("cpu")
    assert before.isoformat() <= found["date"] <= datetime.date.today().isoformat()
    assert found["device"] == cpu_name() != ""
    assert found["threads"] == torch.get_num_threads()
    assert found["torch"] == torch.__version__


def test_csv_repeats_the_environment_in_every_row_and_makes_its_folder(tmp_path):
    path = tmp_path / "a" / "b.csv"
    write_csv(path, [{"x": 1, "y": None}, {"x": 2, "y": "text, with a comma"}], {"date": "today"})
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"x": "1", "y": "", "date": "today"},
        {"x": "2", "y": "text, with a comma", "date": "today"},
    ]
