"""Elements: whatever text goes in comes out as that text, and as nothing else."""

from __future__ import annotations

from html.parser import HTMLParser

import hypothesis.strategies as st
from hypothesis import given

from flatout.page.markup import Html, code, facts, join, known, listing, section, table, tag
from flatout.page.printable import printable


class Reader(HTMLParser):
    """Collects what a browser would see."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    return reader


hostile = st.text() | st.sampled_from(["<b>", "</p><script>", '" onload="x', "&lt;", "&#60;", "<!--", "]]>"])


@given(child=hostile, value=hostile)
def test_text_and_attributes_are_read_back_as_they_are(child: str, value: str) -> None:
    seen = read(tag("p", child, title=value))
    assert seen.tags == [("p", {"title": printable(value)})]
    assert seen.text == printable(child)


@given(st.lists(hostile))
def test_joined_text_is_escaped_and_elements_are_kept(texts: list[str]) -> None:
    seen = read(join([tag("i", text) for text in texts] + texts))
    assert [name for name, _ in seen.tags] == ["i"] * len(texts)
    assert seen.text == "".join(map(printable, texts + texts))


def test_names_of_attributes_lose_their_python_shape() -> None:
    made = tag("rect", class_="wait", stroke_width=1.5, x=3, id=None, aria_label='"')
    assert made == '<rect class="wait" stroke-width="1.5" x="3" aria-label="&quot;"></rect>'


def test_void_elements_have_no_end() -> None:
    assert tag("meta", name="a") == '<meta name="a">'


def test_a_cut_string_is_text_again() -> None:
    assert not isinstance(tag("b", "x")[:3], Html)


@given(hostile)
def test_the_parts_of_a_page_escape(text: str) -> None:
    whole = section(
        text, table([text], [[text]], numbers=(0,)), facts([(text, text)]), code(text), anchor=text
    )
    names = {name for name, _ in read(whole).tags}
    assert names == {
        "section",
        "h2",
        "div",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "dl",
        "dt",
        "dd",
        "code",
    }


def test_an_unknown_place_is_not_available() -> None:
    assert code(None) == "<code>n/a</code>"


def test_numbers_are_set_right_in_head_and_body() -> None:
    made = table(("name", "time"), [("a", "1 s")], numbers=(1,))
    assert made.count('class="number"') == 2
    assert '<td class="number">1 s</td>' in made


def test_what_is_not_known_is_left_out() -> None:
    assert known(None, str) is None and known(0, str) == "0"
    assert facts([("a", None), ("b", "1")]).count("<dt>") == 1
    assert table(("name",), []) == "" and listing("Notes", []) is None


def test_a_section_says_how_to_read_it() -> None:
    assert section("Loss", note="Lower is better.").endswith('<p class="note">Lower is better.</p></section>')
    assert listing("Notes", ["one", "<two>"]) == section(
        "Notes", tag("ul", tag("li", "one"), tag("li", "<two>"))
    )
