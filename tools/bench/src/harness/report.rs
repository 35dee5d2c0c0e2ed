//! Report of a benchmark on standard output.

use std::io::Write;

use indicatif::ProgressBar;
use ringfence_hostnet::out::Out;

use super::layout::Layout;

/// Form of a report on standard output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    /// Heading, one line a row, legend.
    Table,
    /// One JSON object a line.
    Json,
}

impl Format {
    /// Returns the format for the option `--json`.
    pub(crate) fn of(json: bool) -> Format {
        if json { Format::Json } else { Format::Table }
    }
}

/// Report that prints each row as it comes.
pub(crate) struct Report<T> {
    layout: Layout<T>,
    format: Format,
    progress: ProgressBar,
}

impl<T> Report<T> {
    /// Begins a report; a table begins with its heading.
    ///
    /// # Errors
    ///
    /// Returns an error if standard output cannot be written.
    pub(crate) fn begin(layout: Layout<T>, format: Format) -> anyhow::Result<Report<T>> {
        let report = Report { layout, format, progress: ProgressBar::hidden() };
        let heading = report.layout.heading();
        if report.is_table() && !heading.is_empty() {
            report.write(&heading)?;
        }
        Ok(report)
    }

    /// Suspends this progress bar while a row is printed.
    pub(crate) fn beside(self, progress: &ProgressBar) -> Report<T> {
        Report { progress: progress.clone(), ..self }
    }

    /// Returns a report of other rows below those of this one, without a heading.
    pub(crate) fn continued<U>(&self, layout: Layout<U>) -> Report<U> {
        Report { layout, format: self.format, progress: self.progress.clone() }
    }

    pub(crate) fn is_table(&self) -> bool {
        self.format == Format::Table
    }

    /// Prints a row.
    ///
    /// # Errors
    ///
    /// Returns an error if standard output cannot be written.
    pub(crate) fn row(&self, row: &T) -> anyhow::Result<()> {
        self.write(&match self.format {
            Format::Table => self.layout.line(row),
            Format::Json => self.layout.json(row)?,
        })
    }

    /// Ends the report; a table ends with its legend.
    ///
    /// # Errors
    ///
    /// Returns an error if standard output cannot be written.
    pub(crate) fn end(self) -> anyhow::Result<()> {
        let legend = self.layout.legend_text();
        if self.is_table() && !legend.is_empty() { self.write(legend) } else { Ok(()) }
    }

    fn write(&self, text: &str) -> anyhow::Result<()> {
        Ok(self.progress.suspend(|| writeln!(Out, "{text}"))?)
    }
}
