"""Tables for a paper, out of folders whose numbers are known; statistics against numpy and scipy."""

import csv
import json
import re
from io import StringIO
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner
from written import a_client, evaluated, write_run

import fedloom
from fedloom.cli.commands import app
from fedloom.core.errors import UserError
from fedloom.report.paper.formats import escape
from fedloom.report.significance import half_width, holm, sample_std, signed_rank, smallest_p

ACCURACIES = {"local": (0.70, 0.74, 0.78), "fedavg": (0.60, 0.61, 0.65), "fedcrl": (0.90, 0.91, 0.95)}


def write(method, seed, accuracy, *, clients=(), folder="runs", history=None, **more):
    number = len(list(Path(folder).glob("*")))
    summary = {"seed": seed, "personal_accuracy": accuracy, "personal_worst": accuracy / 2, "personal_std": 0.1}
    summary["run_dir"] = str(Path(folder) / f"{number:02d}")
    history = history or [evaluated(1, 0.1), evaluated(2, accuracy)]
    place = Path(folder) / f"{number:02d}"
    return write_run(place, method, seed=seed, history=history, clients=list(clients), summary=summary, **more)


@pytest.fixture
def runs():
    for method, values in ACCURACIES.items():
        for seed, accuracy in enumerate(values):
            write(method, seed, accuracy)
    return Path("runs")


def records(*arguments, **options):
    return list(csv.DictReader(StringIO(fedloom.table(*arguments, format="csv", **options))))


def test_deviations_and_intervals_are_those_of_numpy_and_scipy():
    values = [0.3, 0.7, 0.65, 0.2]
    assert sample_std(values) == pytest.approx(np.std(values, ddof=1))
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert half_width(values) == pytest.approx((high - low) / 2)
    assert (sample_std([0.5]), half_width([0.5])) == (0, 0)


def test_the_signed_rank_test_ignores_rounding_errors():
    one, other = [0.1 + 0.2, 0.5, 0.6, 0.9, 0.8], [0.3, 0.4, 0.4, 0.6, 0.3]
    assert signed_rank(one, other) == stats.wilcoxon([0.5, 0.6, 0.9, 0.8], [0.4, 0.4, 0.6, 0.3]).pvalue
    assert signed_rank([0.1 + 0.2, 1], [0.3, 1]) == 1


def test_p_values_are_exact_with_shared_ranks_and_zero_differences():
    assert signed_rank([0.5] * 6, [0.4] * 6) == 2 / 2**6  # the normal approximation gives 0.014
    generator = np.random.default_rng(0)
    for pairs in range(3, 11):
        steps = generator.integers(-3, 5, pairs)
        left = steps[steps != 0]
        ranks = stats.rankdata(abs(left))
        sums = np.array([sum(ranks[np.array(signs) > 0]) for signs in product((-1, 1), repeat=len(left))])
        found = ranks[left > 0].sum()
        expected = min(1, 2 * min((sums <= found).mean(), (sums >= found).mean()))
        assert signed_rank(steps / 100, np.zeros(pairs)) == pytest.approx(expected)
    one, other = generator.random((2, 50))
    assert signed_rank(one, other) == pytest.approx(stats.wilcoxon(one, other, method="exact").pvalue)
    one, other = generator.integers(0, 9, (2, 200)) / 9
    assert signed_rank(one, other) == pytest.approx(stats.wilcoxon(np.round(one - other, 12), method="approx").pvalue)


def test_holms_correction_by_hand():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.5}) == pytest.approx(
        {"a": 0.04, "b": 0.09, "c": 0.09, "d": 0.5}
    )
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1, "b": 1}
    assert smallest_p(6, 1) == stats.wilcoxon(range(1, 7)).pvalue


def test_the_text_says_what_the_deviation_is(runs):
    lines = fedloom.table(runs).splitlines()
    body = [re.split(r"\s{2,}", line) for line in lines[2:5]]
    assert [row[0] for row in body] == list(ACCURACIES)
    assert body[0][1] == f"74.0 ± {100 * np.std(ACCURACIES['local'], ddof=1):.1f}"
    assert " ".join(lines[6:]) == "Mean ± sample standard deviation (n − 1) over 3 seeds. Last round."


def test_intervals_and_chosen_seeds(runs):
    text = fedloom.table(runs, interval=True, seeds=[0, 2])
    assert f"74.0 ± {100 * half_width([0.70, 0.78]):.1f}" in text
    assert "95% confidence interval (Student's t) over 2 seeds" in " ".join(text.split())
    assert "Results of one seed." in fedloom.table(runs, seeds=[1]) and "±" not in fedloom.table(runs, seeds=[1])


def test_csv_json_and_frames_have_unrounded_values(runs):
    row = next(row for row in records(runs) if row["row"] == "fedavg")
    assert float(row["mean"]) == np.mean(ACCURACIES["fedavg"])
    assert float(row["deviation"]) == np.std(ACCURACIES["fedavg"], ddof=1)
    assert (row["n"], row["seeds"], row["measure"]) == ("3", "0 1 2", "personal_accuracy")
    frame = fedloom.table([runs], format="frame", measures=["personal_accuracy", "personal_worst"])
    assert frame.set_index(["row", "measure"])["mean"]["local", "personal_worst"] == pytest.approx(0.37)
    assert "sample standard deviation" in frame.attrs["caption"]
    assert json.loads(fedloom.table(runs, format="json"))["cells"][2]["rank"] == 1


def test_latex_has_booktabs_the_best_bold_and_the_second_underlined(runs):
    text = fedloom.table(runs, format="latex", measures=["personal_accuracy", "personal_std"])
    assert r"local & $\underline{74.0} \pm 4.0$ & $\mathbf{10.0} \pm 0.0$ \\" in text
    assert r"fedcrl & $\mathbf{92.0} \pm 2.6$" in text
    assert r"method & accuracy (\%) & std over clients (\%) \\" in text
    assert r"\toprule" in text and r"\begin{tabular}{lrr}" in text
    assert r"Mean $\pm$ sample standard deviation (n $-$ 1) over 3 seeds." in text
    assert r"Bold: best; underlined: second best.}" in text


def test_latex_names_are_escaped():
    assert escape(r"a_b%c&d#e$f{g}^~\x") == (
        r"a\_b\%c\&d\#e\$f\{g\}\textasciicircum{}\textasciitilde{}\textbackslash{}x"
    )
    write("mine_50%_a&b", 0, 0.5)
    write("other", 0, 0.6, name="R&D_1")
    text = fedloom.table("runs", format="latex")
    assert r"mine\_50\%\_a\&b & $50.0$ & -- \\" in text
    assert r"method & nowhere & R\&D\_1 \\" in text


def test_two_latex_tables_have_their_own_labels(runs):
    assert r"\label{tab:results}" in fedloom.table(runs, format="latex")
    assert r"\label{tab:digits_1}" in fedloom.table(runs, format="latex", label="tab:digits_1")


def test_names_in_markdown_are_text():
    write("<b>|*x*_y_", 0, 0.5)
    assert r"| \<b>\|\*x\*\_y\_ | 50.0 |" in fedloom.table("runs", format="markdown")


def test_columns_group_measures():
    for data in ("digits", "mnist"):
        for method in ("local", "fedavg"):
            write(method, 0, 0.5, name=data)
    text = fedloom.table("runs", format="latex", measures=["personal_accuracy", "personal_worst"])
    assert r"& \multicolumn{2}{c}{digits} & \multicolumn{2}{c}{mnist} \\" in text
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-5}" in text
    assert r"local & $\mathbf{50.0}$ & $\mathbf{25.0}$ & $\mathbf{50.0}$" in text  # equal numbers, equal ranks
    by_rows = records("runs", rows=["data"], columns=["method"])
    assert {(row["row"], row["column"]) for row in by_rows} == {
        (d, m) for d in ("digits", "mnist") for m in ("local", "fedavg")
    }


def test_settings_that_differ_are_rows_and_settings_chosen_for_a_column_are_not():
    write({"name": "fedprox", "mu": 0.1}, 0, 0.5, name="digits")
    write({"name": "fedprox", "mu": 1}, 0, 0.6, name="mnist")
    assert {row["row"] for row in records("runs")} == {"fedprox"}
    write({"name": "fedprox", "mu": 1}, 0, 0.7, name="digits")
    assert {(row["row"], row["column"]) for row in records("runs")} == {
        ("fedprox mu=0.1", "digits"), ("fedprox mu=1", "mnist"), ("fedprox mu=1", "digits"),
    }  # fmt: skip
    with pytest.raises(UserError, match="rows = method: 'fedprox, digits' mixes runs that differ in method.mu"):
        fedloom.table("runs", rows=["method"])


def paired(method, seed, accuracies, sizes=10):
    each = [a_client(c, [round(100 * a)], [100], train=sizes + c) for c, a in enumerate(accuracies)]
    write(method, seed, float(np.mean(accuracies)), clients=each)


def drawn(seed, number=12):
    generator = np.random.default_rng(seed)
    base = generator.uniform(0.4, 0.6, number)
    return {
        "best": (base + 0.3).round(2), "near": (base + 0.3 + generator.uniform(-0.1, 0.08, number)).round(2),
        "far": base.round(2),
    }  # fmt: skip


def test_tests_over_clients_pair_the_same_clients_and_are_corrected():
    accuracies = drawn(0)
    for method, values in accuracies.items():
        paired(method, 0, values)
    found = {row["row"]: row for row in records("runs", test="clients")}
    p = {name: stats.wilcoxon(np.round(accuracies[name] - accuracies["best"], 12)).pvalue for name in ("near", "far")}
    assert {name: float(found[name]["p"]) for name in p} == pytest.approx(p)
    assert float(found["far"]["p_corrected"]) == pytest.approx(2 * p["far"])
    assert (found["best"]["reference"], found["best"]["p"], found["far"]["pairs"]) == ("True", "", "12")
    text = " ".join(fedloom.table("runs", test="clients").split())
    assert re.search(r"far [\d.]+\* ", text) and re.search(r"near [\d.]+ ", text)
    assert "two-sided Wilcoxon signed-rank test over 12 clients; Holm's correction for 2 comparisons" in text
    against = {row["row"]: row for row in records("runs", test="clients", against="far")}
    assert against["far"]["reference"] == "True" and float(against["best"]["p"]) == pytest.approx(p["far"])


def test_each_column_is_a_family_of_comparisons():
    accuracies = drawn(0)
    for data in ("digits", "mnist"):
        for method, values in accuracies.items():
            each = [a_client(c, [round(100 * a)], [100], train=10 + c) for c, a in enumerate(values)]
            write(method, 0, float(np.mean(values)), clients=each, name=data)
    found = {(row["row"], row["column"]): float(row["p_corrected"] or 0) for row in records("runs", test="clients")}
    p = signed_rank(accuracies["far"], accuracies["best"])
    assert found["far", "digits"] == found["far", "mnist"] == pytest.approx(2 * p)
    text = " ".join(fedloom.table("runs", test="clients").split())
    assert "Holm's correction for 2 comparisons in each column" in text


@pytest.mark.parametrize(
    ("sizes", "pairs", "said"), [(0, "12", "12 clients (averaged over seeds)"), (50, "24", "24 clients of all seeds")]
)
def test_a_client_counts_once_if_it_is_the_same_with_every_seed(sizes, pairs, said):
    accuracies = {seed: drawn(seed) for seed in (0, 1)}
    for seed, methods in accuracies.items():
        for method, values in methods.items():
            paired(method, seed, values, sizes=10 + seed * sizes)
    found = next(row for row in records("runs", test="clients") if row["row"] == "near")
    join = (lambda each: np.mean(each, axis=0)) if pairs == "12" else np.concatenate
    one, best = (join([accuracies[seed][name] for seed in (0, 1)]) for name in ("near", "best"))
    assert found["pairs"] == pairs
    assert float(found["p"]) == pytest.approx(signed_rank(one, best))
    assert said in " ".join(fedloom.table("runs", test="clients").split())


def test_other_clients_are_not_paired():
    paired("local", 0, [0.5, 0.6])
    paired("fedavg", 0, [0.5, 0.6], sizes=20)
    with pytest.raises(UserError, match="test = 'clients': .* have different clients"):
        fedloom.table("runs", test="clients")


def test_seeds_are_tested_from_six_on(runs):
    text = " ".join(fedloom.table(runs, test="seeds").split())
    assert "Not tested: a paired test over seeds needs at least 6 seeds." in text
    assert "*" not in text and "95% confidence interval" in text
    for seed in range(6):
        write("one", seed, 0.5 + seed / 100, folder="six")
        write("two", seed, 0.6 + seed / 50, folder="six")
    found = {row["row"]: row for row in records("six", test="seeds")}
    assert float(found["one"]["p"]) == stats.wilcoxon(range(1, 7)).pvalue == 0.03125
    assert "52.5*" in fedloom.table("six", test="seeds")
    for seed in range(6):
        write("three", seed, 0.3, folder="six")
    text = " ".join(fedloom.table("six", test="seeds").split())
    assert "With 6 pairs and 2 comparisons, no p below 0.062 is possible." in text and "52.5 ±" in text


def test_the_best_round_is_named():
    rounds = [evaluated(1, 0.9, validation_personal_accuracy=0.5), evaluated(2, 0.7, validation_personal_accuracy=0.6)]
    write("local", 0, 0.4, history=rounds, folder="validated")
    text = fedloom.table("validated", round="best")
    assert "70.0" in text and "Round that is best on validation samples, by accuracy." in text
    write("local", 1, 0.4, history=[evaluated(1, 0.9), evaluated(2, 0.7)], folder="tested")
    text = fedloom.table("tested", round="best")
    assert "90.0" in text and "Best round on test data, by accuracy: optimistic, not a result." in text
    with pytest.raises(UserError, match="some runs have validation samples, but 'tested/00' has none"):
        fedloom.table(["validated", "tested"], round="best")


def test_recorded_metrics_and_fields_of_rounds_only():
    write("local", 0, 0.4, history=[evaluated(1, 0.4, personal_auc=0.8125, personal_loss=2.5)])
    assert "0.812" in fedloom.table("runs", measures=["auc"])
    assert "2.50" in fedloom.table("runs", measures=["personal_loss"], digits=2)


def test_seeds_without_a_finite_value_are_named():
    for seed, loss in ((0, 0.5), (1, 0.7), (2, None)):
        write("local", seed, 0.5, history=[evaluated(1, 0.5), evaluated(2, 0.5, personal_loss=loss)])
    text = " ".join(fedloom.table("runs", measures=["personal_loss"]).split())
    assert "0.600 ± 0.141" in text and "over 2 seeds" in text
    assert "Left out, without a finite value: local (seed 2)." in text
    assert "Left out" not in fedloom.table("runs")


def test_nothing_to_compare_is_said(runs):
    paired("alone", 0, [0.5, 0.6, 0.7])
    assert "Not tested: no two rows have values" in fedloom.table(runs / "09", test="clients")


def test_summaries_give_the_overview_or_the_table_of_their_folders(runs):
    summaries = [
        json.loads((path / "summary.json").read_text()) | {"global_accuracy": None} for path in sorted(runs.iterdir())
    ]
    assert "spread" in fedloom.table(summaries) and "±: sample std over seeds" in fedloom.table(summaries)
    assert fedloom.table(summaries, format="markdown") == fedloom.table(runs, format="markdown")
    assert "| fedcrl | **92.0 ± 2.6** |" in fedloom.table(runs, format="markdown")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--format", "word"], "format = 'word': must be one of text, markdown"),
        (["--measure", "personal_acuracy"], "no run has recorded it; choose among personal_accuracy"),
        (["--columns", "data.nme"], "columns: no run's recipe has a field 'data.nme'; fields that differ between"),
        (["--seeds", "7"], "seeds: no run has the seed 7; choose among 0, 1, 2"),
        (["--against", "fedfoo", "--test", "clients"], "the table has no such row; choose among local, fedavg, fedcrl"),
        (["--against", "local"], "against = 'local': is the reference of a test; set test"),
        (["--test", "clients", "--round", "best"], "test = 'clients': run folders have the results"),
        (["--test", "clients"], "has no results of single clients"),
        (["--label", "a}b"], "label = 'a}b': must consist of letters"),
        (["--to", "missing/a.tex"], "--to missing/a.tex: cannot be written"),
    ],
)  # fmt: skip
def test_mistakes_name_the_argument_and_the_remedy(runs, arguments, error):
    with pytest.raises(UserError, match=re.escape(error)):
        CliRunner().invoke(app, ["table", str(runs), *arguments], catch_exceptions=False)


def test_unfinished_and_repeated_runs_are_refused(runs):
    write("local", 0, 0.5, folder="again")
    with pytest.raises(UserError, match="'runs/00' and 'again/00' are the same run .*which would count twice"):
        fedloom.table([runs, "again"])
    (runs / "04" / "summary.json").unlink()
    with pytest.raises(UserError, match="'runs/04' is not finished .2 of 2 rounds.*fedloom resume runs/04"):
        fedloom.table(runs)


def test_the_command_writes_a_file(runs):
    result = CliRunner().invoke(app, ["table", str(runs), "--format", "latex", "--to", "a.tex"], catch_exceptions=False)
    assert result.exit_code == 0
    assert Path("a.tex").read_text() == fedloom.table(runs, format="latex") + "\n"
