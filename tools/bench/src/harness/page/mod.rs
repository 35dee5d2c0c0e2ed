//! Reports as one self-contained HTML page: text, tables, plots and bar charts.
//!
//! Any benchmark with `--html FILE` builds a [`Page`] of its rows. Drawings are SVG within the page: lines over an axis
//! ([`plot`]), and bars with their spread and published values ([`chart`]). The page needs only a browser and no script, and
//! a diff of two pages shows the changes.
//!
//! Every page has light and dark colours (`style.css`), a list of its headings, and a link that skips it. Wide content
//! scrolls within its own region, which the keyboard reaches; the page itself fits a screen of 360 px. A drawing is an
//! image with a name and a description, and a bar chart is followed by its figures as a table.

mod chart;
mod plot;

use std::fmt::Write;
use std::path::Path;

use anyhow::Context;

use super::layout::Layout;
pub(crate) use chart::{Bar, BarChart, BarGroup, number};
pub(crate) use plot::{Axis, Plot, Scale, Series};

/// Colours and sizes of all pages.
const STYLE: &str = include_str!("style.css");

/// Builder of an HTML page.
pub(crate) struct Page {
    title: String,
    body: String,
    headings: Vec<String>,
    /// Drawings so far, which number their identifiers.
    drawings: usize,
}

impl Page {
    pub(crate) fn new(title: &str) -> Page {
        Page { title: title.to_owned(), body: String::new(), headings: Vec::new(), drawings: 0 }
    }

    /// Adds a heading within the page, which the list at its top shows.
    pub(crate) fn heading(&mut self, text: &str) {
        self.headings.push(text.to_owned());
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(self.body, "<h2 id=\"h{}\">{}</h2>", self.headings.len(), escape(text));
    }

    /// Adds paragraphs, which an empty line separates.
    pub(crate) fn text(&mut self, text: &str) {
        for paragraph in text.split("\n\n").filter(|text| !text.trim().is_empty()) {
            self.element("p", paragraph);
        }
    }

    /// Adds a paragraph that the reader must not miss.
    pub(crate) fn note(&mut self, text: &str) {
        let text = escape(text);
        let _ = writeln!(self.body, "<p class=\"note\"><strong>Note:</strong> {text}</p>");
    }

    /// Adds lines of a shell, with words that introduce them.
    pub(crate) fn command(&mut self, introduction: &str, lines: &str) {
        self.element("p", introduction);
        let (name, lines) = (escape(introduction), escape(lines));
        let _ = writeln!(
            self.body,
            "<pre tabindex=\"0\" role=\"region\" aria-label=\"{name}\"><code>{lines}</code></pre>"
        );
    }

    /// Adds a table. The first column is for names, the others are for numbers.
    pub(crate) fn table(&mut self, caption: &str, heading: &[&str], rows: &[Vec<String>]) {
        let name = escape(caption);
        let _ = write!(
            self.body,
            "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"Table: {name}\">\n\
             <table>\n<caption>{name}</caption>\n<thead><tr>"
        );
        for cell in heading {
            let _ = write!(self.body, "<th scope=\"col\">{}</th>", escape(cell));
        }
        self.body.push_str("</tr></thead>\n");
        self.body_rows(rows);
        self.body.push_str("</div>\n");
    }

    /// Adds a table of names and texts, without a heading.
    pub(crate) fn facts(&mut self, caption: &str, rows: &[Vec<String>]) {
        let caption = escape(caption);
        let _ = writeln!(self.body, "<table class=\"facts\">\n<caption>{caption}</caption>");
        self.body_rows(rows);
    }

    fn body_rows(&mut self, rows: &[Vec<String>]) {
        self.body.push_str("<tbody>\n");
        for row in rows {
            self.body.push_str("<tr>");
            for (at, cell) in row.iter().enumerate() {
                let (name, scope) = if at == 0 { ("th", " scope=\"row\"") } else { ("td", "") };
                let _ = write!(self.body, "<{name}{scope}>{}</{name}>", escape(cell));
            }
            self.body.push_str("</tr>\n");
        }
        self.body.push_str("</tbody>\n</table>\n");
    }

    /// Adds a table of rows with the columns of their layout.
    pub(crate) fn rows<T>(&mut self, caption: &str, layout: &Layout<T>, rows: &[T]) {
        let cells: Vec<Vec<String>> = rows.iter().map(|row| layout.texts(row)).collect();
        self.table(caption, &layout.headings(), &cells);
    }

    /// Adds a plot; does nothing without points.
    pub(crate) fn plot(&mut self, plot: &Plot) -> anyhow::Result<()> {
        if let Some(svg) = plot.svg()? {
            let name = escape(&plot.title);
            let image = self.image(&plot.title, &plot.description());
            let svg = svg.replacen("<svg ", &image.attributes, 1).replacen('>', &image.start, 1);
            let _ = writeln!(
                self.body,
                "<div class=\"plot scroll\" role=\"region\" tabindex=\"0\" aria-label=\"Plot: {name}\">\n{svg}\n</div>"
            );
        }
        Ok(())
    }

    /// Adds a bar chart with its figures as a table; does nothing without bars.
    pub(crate) fn chart(&mut self, chart: &BarChart) {
        let Some((size, marks)) = chart.marks() else { return };
        let image = self.image(&chart.title, &chart.description());
        let title = escape(&chart.heading());
        let _ = write!(
            self.body,
            "<figure>\n<figcaption>{title}</figcaption>\n{}class=\"chart\" {size}{}{marks}</svg>\n",
            image.attributes, image.start
        );
        let key = escape(&chart.key());
        let _ =
            write!(self.body, "<p class=\"key\">{key}</p>\n<details><summary>Figures</summary>\n");
        let (heading, rows) = chart.table();
        self.table(&chart.heading(), &heading, &rows);
        self.body.push_str("</details>\n</figure>\n");
    }

    /// Returns the complete page.
    pub(crate) fn finish(&self) -> String {
        let title = escape(&self.title);
        let mut list = String::new();
        for (number, heading) in (1..).zip(&self.headings) {
            let _ = writeln!(list, "<li><a href=\"#h{number}\">{}</a></li>", escape(heading));
        }
        if !list.is_empty() {
            list = format!("<nav aria-label=\"Contents\">\n<ul>\n{list}</ul>\n</nav>\n");
        }
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>{title}</title>\n\
             <link rel=\"icon\" href=\"data:,\">\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
             <a class=\"skip\" href=\"#content\">Skip to the content</a>\n\
             <header>\n<h1>{title}</h1>\n{list}</header>\n<main id=\"content\" tabindex=\"-1\">\n{}</main>\n</body>\n</html>\n",
            self.body
        )
    }

    /// Writes the page to a file.
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        std::fs::write(path, self.finish()).with_context(|| format!("writing {}", path.display()))
    }

    fn element(&mut self, name: &str, text: &str) {
        let _ = writeln!(self.body, "<{name}>{}</{name}>", escape(text));
    }

    /// Returns the start of a drawing: an image with a name and a description, for readers that do not see it.
    fn image(&mut self, title: &str, description: &str) -> Image {
        self.drawings += 1;
        let n = self.drawings;
        let (title, description) = (escape(title), escape(description));
        Image {
            attributes: format!(
                "<svg role=\"img\" aria-labelledby=\"t{n}\" aria-describedby=\"d{n}\" "
            ),
            start: format!(
                ">\n<title id=\"t{n}\">{title}</title>\n<desc id=\"d{n}\">{description}</desc>\n"
            ),
        }
    }
}

/// Start of a drawing, before and after the attributes of its size.
struct Image {
    attributes: String,
    start: String,
}

/// Escapes text for HTML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests;
