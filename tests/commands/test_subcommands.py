"""Commands with subcommands: help and errors are those of the subcommand asked for."""

import pytest

import softfree_cli


@pytest.mark.parametrize("command", ["benchmark memory", "figure heatmap", "validate detection"])
def test_an_unknown_option_points_to_the_help_of_the_subcommand(command, capsys):
    with pytest.raises(SystemExit) as stop:
        softfree_cli.main([*command.split(), "--bogus"])
    assert stop.value.code == 2
    assert f"softfree {command} --help" in capsys.readouterr().err


@pytest.mark.parametrize("command, first", [("benchmark", "attention"), ("validate", "detection")])
def test_the_help_of_the_command_lists_what_there_is(command, first, capsys):
    assert softfree_cli.main([command, "--help"]) == 0
    assert first in capsys.readouterr().out
    assert softfree_cli.main([command, "nothing"]) == 2
    assert first in capsys.readouterr().err
