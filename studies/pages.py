"""Places in the pages of the documentation that studies fill."""

import re


def fill_place(page: str, name: str, text: str) -> str:
    """Return a page with what stands between two marks written anew.

    Parameters
    ----------
    page
        The page, with a line ``<!-- name -->`` and a later one ``<!-- end name -->``.
    name
        The name in the marks.
    text
        What to write between them.

    Raises
    ------
    ValueError
        If the page has no such place, or several.
    """
    place = re.compile(
        rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.DOTALL
    )
    filled, count = place.subn(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page)
    if count != 1:
        has = f"the page has {count or 'no'}"
        msg = f"{has} <!-- {name} --> ... <!-- end {name} -->; it needs one"
        raise ValueError(msg)
    return filled
