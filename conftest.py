"""Which tests run here. A test's marks of the kind skipif say where it applies: slow, on_a_card,
about_the_cpu, needs. Elsewhere it is left out, and a line above the first test says how many are.
So a skip that is reported says something about this machine.

    SLOW=1 python -m pytest        the slow tests too
    SLOW=only python -m pytest     the slow tests alone
    NEEDS=only python -m pytest    those alone that need a library beyond requirements.txt
"""
import collections
import os
import re

import pytest

left_out = collections.Counter()


@pytest.hookimpl(trylast=True)                       # after -k
def pytest_collection_modifyitems(config, items):
    """A test file that is copied without this one skips what is left out here."""
    here, elsewhere = [], []
    for item in items:
        marks = {mark.kwargs["reason"]: mark.args[0] for mark in item.iter_markers("skipif")}
        assert all(isinstance(condition, bool) for condition in marks.values()), item.nodeid
        reasons = [reason for reason, applies_not in marks.items() if applies_not]
        is_slow = any(reason.startswith("slow:") for reason in marks)
        of_a_library = any(re.match("needs (?!a card)", reason) for reason in marks)
        if os.environ.get("SLOW") == "only" and not is_slow:
            reasons = ["quick: runs without SLOW"]
        if os.environ.get("NEEDS") == "only" and not of_a_library:
            reasons = ["needs no library: runs without NEEDS"]
        left_out.update(reasons[-1:])                # of the outermost mark
        (elsewhere if reasons else here).append(item)
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = here


def pytest_report_collectionfinish():
    return [f"left out: {count} ({reason})" for reason, count in left_out.most_common()]
