"""All messages of the package are in one golden file."""

import ast

import pytest

from tests.golden.files import check_golden
from tests.golden.messages import describe_call, list_messages, template


def test_messages_match_the_golden_file(request: pytest.FixtureRequest) -> None:
    check_golden(request, "messages.txt", list_messages())


def test_template_replaces_computed_parts() -> None:
    source = "f'{n} rows' + (MORE if few else ' at most') + why()"
    assert template(ast.parse(source, mode="eval").body, {"MORE": ast.Constant(" or more")}) == (
        "{} rows( or more |  at most){}"
    )


def test_error_call_is_recognized_by_class_or_parts() -> None:
    call = ast.parse("OptionError('no codec', why='bits', mend=fix)", mode="eval").body
    assert isinstance(call, ast.Call)
    assert describe_call(call, {"OptionError": "NB-104"}, {}) == "NB-104 no codec\n  why: bits\n  mend: {}"
    assert describe_call(call, {}, {}) == "NB-??? no codec\n  why: bits\n  mend: {}"
    other = ast.parse("print('no codec')", mode="eval").body
    assert isinstance(other, ast.Call)
    assert describe_call(other, {"OptionError": "NB-104"}, {}) is None
