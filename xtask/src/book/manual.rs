//! Manual pages as Markdown, from the roff that the program's generator (clap_mangen) writes.
//!
//! Only the generator's requests are known; another one is an error. Options become a list of definitions, each with an
//! anchor (`#opt-publish`). The last section, `EXTRA`, is text whose lines and indentation count.

use std::collections::BTreeSet;

use anyhow::bail;

/// Section of the generator with the text behind the options.
const EXTRA: &str = "EXTRA";

/// Part of a section, with its text in roff.
enum Block {
    Paragraph(String),
    /// Option or argument; the paragraphs and items that follow describe it.
    Term(String),
    /// Item of a list.
    Item(String),
}

/// Section of a page.
struct Section {
    title: String,
    blocks: Vec<Block>,
    /// Lines of a section that is shown as it is.
    lines: Vec<String>,
}

/// Converts the page `name`. References to a page in `known` become links.
///
/// # Errors
///
/// Returns an error for a request that the generator did not use when this was written.
pub(super) fn markdown(name: &str, roff: &str, known: &BTreeSet<String>) -> anyhow::Result<String> {
    let mut page = format!("# {name}(1)\n");
    for section in parse(roff)? {
        page += &section.render(known);
    }
    Ok(page)
}

fn parse(roff: &str) -> anyhow::Result<Vec<Section>> {
    let mut sections: Vec<Section> = vec![];
    // Set if the next line continues the last block.
    let mut continues = false;
    let mut lines = roff.lines();
    while let Some(line) = lines.next() {
        let (request, argument) = match line.strip_prefix('.') {
            Some(request) => request.split_once(' ').unwrap_or((request, "")),
            None => ("", line),
        };
        if request == "SH" {
            let title = argument.trim_matches('"').to_owned();
            sections.push(Section { title, blocks: vec![], lines: vec![] });
            continues = false;
            continue;
        }
        let Some(section) = sections.last_mut() else { continue };
        if section.title == EXTRA {
            section.lines.push(line.to_owned());
            continue;
        }
        let block = match (request, argument) {
            ("TP", _) => Block::Term(lines.next().unwrap_or_default().to_owned()),
            ("IP", _) => Block::Item(lines.next().unwrap_or_default().to_owned()),
            ("PP" | "br" | "RS" | "RE", _) | ("", "") => {
                continues = false;
                continue;
            }
            ("", text) => match section.blocks.last_mut() {
                Some(Block::Paragraph(earlier) | Block::Item(earlier)) if continues => {
                    *earlier += "\n";
                    *earlier += text;
                    continue;
                }
                _ => Block::Paragraph(text.to_owned()),
            },
            _ => bail!("the request .{request} is unknown"),
        };
        continues = !matches!(block, Block::Term(_));
        section.blocks.push(block);
    }
    Ok(sections)
}

impl Section {
    fn render(&self, known: &BTreeSet<String>) -> String {
        if self.title == EXTRA {
            let lines: Vec<String> = self.lines.iter().map(|line| plain(line)).collect();
            return format!(
                "\n## Examples and notes\n\n```text\n{}\n```\n",
                lines.join("\n").trim()
            );
        }
        let mut text = format!("\n## {}\n\n", sentence(&self.title));
        let (mut in_terms, mut in_items) = (false, false);
        // Without empty lines, Markdown takes all of it as one block of HTML.
        for block in &self.blocks {
            if in_items && !matches!(block, Block::Item(_)) {
                text += "</ul>\n";
                in_items = false;
            }
            match block {
                Block::Paragraph(paragraph) => text += &format!("<p>{}</p>\n", html(paragraph)),
                Block::Item(item) => {
                    text += if in_items { "" } else { "<ul>\n" };
                    in_items = true;
                    text += &format!("<li>{}</li>\n", html(item));
                }
                Block::Term(term) => {
                    text += if in_terms { "</dd>\n" } else { "<dl>\n" };
                    in_terms = true;
                    text += &format!("{}\n<dd>\n", definition(&plain(term), known));
                }
            }
        }
        text += if in_items { "</ul>\n" } else { "" };
        text + if in_terms { "</dd>\n</dl>\n" } else { "" }
    }
}

/// Returns the term of a definition: an option with its anchor, or the name of another page.
fn definition(term: &str, known: &BTreeSet<String>) -> String {
    let code = format!("<code>{}</code>", escape(term));
    if let Some(page) = term.strip_suffix("(1)").filter(|page| known.contains(*page)) {
        return format!("<dt><a href=\"{page}.1.html\">{code}</a></dt>");
    }
    let long = term.split("--").nth(1).unwrap_or_default();
    let name: String = long.chars().take_while(|c| c.is_alphanumeric() || *c == '-').collect();
    if name.is_empty() {
        format!("<dt>{code}</dt>")
    } else {
        format!("<dt id=\"opt-{name}\">{code}</dt>")
    }
}

/// Returns a title in capitals with the first letter alone in capitals.
fn sentence(title: &str) -> String {
    let mut letters = title.chars();
    let first = letters.next().map(String::from).unwrap_or_default();
    first + &letters.as_str().to_lowercase()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Returns roff as text, without fonts.
fn plain(roff: &str) -> String {
    parts(roff)
        .filter_map(|part| if let Part::Text(text) = part { Some(text) } else { None })
        .collect()
}

/// Returns roff as HTML, with words in backticks as code.
fn html(roff: &str) -> String {
    let (mut out, mut open, mut in_code) = (String::new(), "", false);
    for part in parts(roff) {
        match part {
            Part::Font(font) => {
                out += &close(open);
                open = match font {
                    'B' => "strong",
                    'I' => "em",
                    _ => "",
                };
                if !open.is_empty() {
                    out += &format!("<{open}>");
                }
            }
            Part::Text("`") => {
                out += if in_code { "</code>" } else { "<code>" };
                in_code = !in_code;
            }
            Part::Text(text) => out += &escape(text),
        }
    }
    out += if in_code { "</code>" } else { "" };
    out + &close(open)
}

fn close(tag: &str) -> String {
    if tag.is_empty() { String::new() } else { format!("</{tag}>") }
}

/// Piece of roff: a change of the font, or text, at most one character of the source long.
enum Part<'a> {
    Font(char),
    Text(&'a str),
}

fn parts(roff: &str) -> impl Iterator<Item = Part<'_>> {
    /// Escapes of the generator, and their text.
    const ESCAPES: [(&str, &str); 7] = [
        ("*(Aq", "'"),
        ("(aq", "'"),
        ("(bu", "•"),
        ("-", "-"),
        ("&", ""),
        ("e", "\\"),
        ("\\", "\\"),
    ];
    let mut rest = roff;
    std::iter::from_fn(move || {
        let first = rest.chars().next()?;
        if let Some(escape) = rest.strip_prefix('\\') {
            let mut font = escape.strip_prefix('f').unwrap_or_default().chars();
            if let Some(name) = font.next() {
                rest = font.as_str();
                return Some(Part::Font(name));
            }
            if let Some((name, text)) = ESCAPES.iter().find(|(name, _)| escape.starts_with(name)) {
                rest = &escape[name.len()..];
                return Some(Part::Text(text));
            }
        }
        let (text, after) = rest.split_at(first.len_utf8());
        rest = after;
        Some(Part::Text(text))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#".ie \n(.g .ds Aq \(aq
.el .ds Aq '
.TH ringfence 1  "ringfence 0.1.0" Ringfence
.SH NAME
ringfence \- A domain\*(Aqs <end>
.SH SYNOPSIS
\fBringfence\fR [\fB\-p\fR|\fB\-\-publish\fR] [\fICMD\fR]
.SH "LENT MEMORY"
.TP
\fB\-p\fR, \fB\-\-publish\fR \fI<SPEC>\fR
First line of `\-p`,
in two lines

Second paragraph
.br

.br
\fIPossible values:\fR
.RS 14
.IP \(bu 2
copy: one
.IP \(bu 2
map: two
.RE
.TP
ringfence\-run(1)
Run
.SH EXTRA
Examples:
  A shell:
    ringfence run \-\- sh
"#;

    #[test]
    fn page_of_the_generator_becomes_markdown() {
        let known = BTreeSet::from(["ringfence-run".to_owned()]);
        assert_eq!(
            markdown("ringfence", PAGE, &known).unwrap(),
            "# ringfence(1)\n\n## Name\n\n<p>ringfence - A domain's &lt;end&gt;</p>\n\
             \n## Synopsis\n\n<p><strong>ringfence</strong> [<strong>-p</strong>|<strong>--publish</strong>] \
             [<em>CMD</em>]</p>\n\
             \n## Lent memory\n\n<dl>\n<dt id=\"opt-publish\"><code>-p, --publish &lt;SPEC&gt;</code></dt>\n<dd>\n\
             <p>First line of <code>-p</code>,\nin two lines</p>\n<p>Second paragraph</p>\n\
             <p><em>Possible values:</em></p>\n<ul>\n<li>copy: one</li>\n<li>map: two</li>\n</ul>\n</dd>\n\
             <dt><a href=\"ringfence-run.1.html\"><code>ringfence-run(1)</code></a></dt>\n<dd>\n<p>Run</p>\n</dd>\n</dl>\n\
             \n## Examples and notes\n\n```text\nExamples:\n  A shell:\n    ringfence run -- sh\n```\n"
        );
    }

    #[test]
    fn unknown_request_is_an_error() {
        let page = ".SH NAME\n.XY\n";
        assert!(markdown("a", page, &BTreeSet::new()).unwrap_err().to_string().contains(".XY"));
    }
}
