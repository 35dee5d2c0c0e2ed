//! Tables of text cells for a terminal and for a page.

use std::fmt::Write as _;

/// Table of text cells.
pub(crate) struct Table<'a> {
    pub(crate) title: String,
    pub(crate) heading: Vec<&'a str>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl Table<'_> {
    /// Formats columns as wide as their content; the last column, of words, is left-aligned.
    pub(crate) fn text(&self) -> String {
        let cells = || {
            std::iter::once(&self.heading)
                .map(|row| row.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>())
                .chain(self.rows.iter().cloned())
        };
        let mut widths = vec![0; self.heading.len()];
        for row in cells() {
            widths.iter_mut().zip(&row).for_each(|(width, cell)| *width = cell.len().max(*width));
        }
        let mut text = format!("{}\n", self.title);
        for row in cells() {
            let last = row.len().saturating_sub(1);
            for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
                if at == last {
                    text += cell;
                } else {
                    // Writing to a string cannot fail.
                    let _ = write!(text, "{cell:>width$}  ");
                }
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        text
    }
}
