"""Which tests run here. A test's marks say where it applies: slow, on_a_card, about_the_cpu and
needs of test_moe.py. Elsewhere it is left out, and a line above the first test says how many are.
So a skip that is reported says something about this machine.

    SLOW=1 python -m pytest        the slow tests too
    SLOW=only python -m pytest     the slow tests alone
"""
import collections
import os

import pytest

left_out = collections.Counter()


@pytest.hookimpl(trylast=True)                       # after -k
def pytest_collection_modifyitems(config, items):
    """The marks are skipif's: a test file that is copied without this one skips what is left out
    here."""
    here, elsewhere = [], []
    for item in items:
        marks = list(item.iter_markers("skipif"))
        reasons = [mark.kwargs["reason"] for mark in marks if mark.args[0]]
        is_slow = any(mark.kwargs["reason"].startswith("slow:") for mark in marks)
        if os.environ.get("SLOW") == "only" and not is_slow:
            reasons = ["quick: runs without SLOW"]
        left_out.update(reasons[-1:])                # of the outermost mark
        (elsewhere if reasons else here).append(item)
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = here


def pytest_report_collectionfinish():
    return [f"left out: {count} ({reason})" for reason, count in left_out.most_common()]
