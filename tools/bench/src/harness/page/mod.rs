//! Reports as one self-contained HTML page: text, tables and plots.
//!
//! Any benchmark with `--html FILE` builds a [`Page`] of its rows. Plots are SVG within the page
//! ([`plot`]). The page needs only a browser, and a diff of two pages shows the changes.

mod plot;

use std::fmt::Write;
use std::path::Path;

use anyhow::Context;

use super::layout::Layout;
pub(crate) use plot::{Axis, Plot, Scale, Series};

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;max-width:62rem;margin:2rem auto;\
padding:0 1rem;color:#222;background:#fff}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}\
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}\
th,td{border-bottom:1px solid #ddd;padding:.2rem .7rem;text-align:right}\
th:first-child,td:first-child{text-align:left}th{border-bottom:2px solid #888}\
svg{width:100%;height:auto;margin:1rem 0}";

/// Builder of an HTML page.
pub(crate) struct Page {
    title: String,
    body: String,
}

impl Page {
    pub(crate) fn new(title: &str) -> Page {
        Page { title: title.to_owned(), body: String::new() }
    }

    /// Adds a heading within the page.
    pub(crate) fn heading(&mut self, text: &str) {
        self.element("h2", text);
    }

    /// Adds paragraphs, which an empty line separates.
    pub(crate) fn text(&mut self, text: &str) {
        for paragraph in text.split("\n\n").filter(|text| !text.trim().is_empty()) {
            self.element("p", paragraph);
        }
    }

    /// Adds a table. The first column is for names, the others are for numbers.
    pub(crate) fn table(&mut self, heading: &[&str], rows: &[Vec<String>]) {
        self.body.push_str("<table>\n<tr>");
        heading.iter().for_each(|cell| self.element("th", cell));
        self.body.push_str("</tr>\n");
        for row in rows {
            self.body.push_str("<tr>");
            row.iter().for_each(|cell| self.element("td", cell));
            self.body.push_str("</tr>\n");
        }
        self.body.push_str("</table>\n");
    }

    /// Adds a table of rows with the columns of their layout.
    pub(crate) fn rows<T>(&mut self, layout: &Layout<T>, rows: &[T]) {
        let cells: Vec<Vec<String>> = rows.iter().map(|row| layout.texts(row)).collect();
        self.table(&layout.headings(), &cells);
    }

    /// Adds a plot; does nothing without points.
    pub(crate) fn plot(&mut self, plot: &Plot) -> anyhow::Result<()> {
        if let Some(svg) = plot.svg()? {
            self.body.push_str(&svg);
            self.body.push('\n');
        }
        Ok(())
    }

    /// Returns the complete page.
    pub(crate) fn finish(&self) -> String {
        let title = escape(&self.title);
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}</title>\n\
             <style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{}</body>\n</html>\n",
            self.body
        )
    }

    /// Writes the page to a file.
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        std::fs::write(path, self.finish()).with_context(|| format!("writing {}", path.display()))
    }

    fn element(&mut self, name: &str, text: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.body, "<{name}>{}</{name}>", escape(text));
    }
}

/// Escapes text for HTML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_is_self_contained_and_escapes_text() {
        let mut page = Page::new("rates & <ratios>");
        page.heading("a < b");
        page.text("one\n\ntwo");
        page.table(&["mode", "Mpps"], &[vec!["copy".into(), "<1>".into()]]);
        page.plot(&Plot {
            title: "x < y".into(),
            x: Axis::new("octets", Scale::Log),
            y: Axis::linear("Mpps"),
            series: vec![Series::new("copy & co", vec![(64.0, 3.0), (1500.0, 2.0)])],
        })
        .unwrap();
        let html = page.finish();
        for text in ["rates &amp; &lt;ratios&gt;", "a &lt; b", "<p>two</p>", "&lt;1&gt;", "<svg"] {
            assert!(html.contains(text), "{text}: {html}");
        }
        // Nothing is loaded; the only address is the namespace of SVG.
        let elsewhere = html.replace("http://www.w3.org/2000/svg", "");
        assert!(!elsewhere.contains("http") && !elsewhere.contains("<script"), "{elsewhere}");
        assert!(html.contains("copy &amp; co") && html.contains("x &lt; y"), "{html}");
    }

    #[test]
    fn plot_without_points_is_omitted() {
        let mut page = Page::new("t");
        let plot = Plot {
            title: "t".into(),
            x: Axis::linear("x"),
            y: Axis::linear("y"),
            series: vec![Series::new("none", Vec::new())],
        };
        page.plot(&plot).unwrap();
        assert!(!page.finish().contains("<svg"));
    }
}
