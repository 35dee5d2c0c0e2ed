//! Layout of a report: the columns that describe a row in JSON and in the table.

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::value::Value;

/// Columns of a row, in the order of the fields of its JSON object.
pub(crate) struct Layout<T> {
    columns: Vec<Column<T>>,
    /// Fields of the table's columns in the table's order, if that differs from JSON's.
    order: Vec<&'static str>,
    tail: Option<Tail<T>>,
    legend: String,
}

/// Function that writes a part of a row.
type RowText<T> = Box<dyn Fn(&T) -> String>;

struct Column<T> {
    field: &'static str,
    value: Box<dyn Fn(&T) -> Value>,
    cell: Option<Cell>,
    /// Text of the cell, if it is more than the value.
    text: Option<RowText<T>>,
}

/// Text behind the last column of the table.
struct Tail<T> {
    heading: &'static str,
    text: RowText<T>,
}

/// Cell of a table: heading, width and number format.
pub(crate) struct Cell {
    heading: &'static str,
    width: usize,
    is_left: bool,
    unit: f64,
    digits: usize,
}

/// Returns a left-aligned cell. Longer text moves the cells behind it.
pub(crate) fn left(heading: &'static str, width: usize) -> Cell {
    Cell { heading, width, is_left: true, unit: 1.0, digits: 0 }
}

/// Returns a right-aligned cell.
pub(crate) fn right(heading: &'static str, width: usize) -> Cell {
    Cell { is_left: false, ..left(heading, width) }
}

impl Cell {
    /// Sets the number of digits behind the decimal point.
    pub(crate) fn digits(self, digits: usize) -> Cell {
        Cell { digits, ..self }
    }

    /// Sets the unit of the table in terms of the field's.
    pub(crate) fn unit(self, unit: f64) -> Cell {
        Cell { unit, ..self }
    }

    fn pad(&self, text: &str) -> String {
        let width = self.width;
        if self.is_left { format!("{text:<width$}") } else { format!("{text:>width$}") }
    }
}

impl<T> Layout<T> {
    pub(crate) fn new() -> Layout<T> {
        Layout { columns: Vec::new(), order: Vec::new(), tail: None, legend: String::new() }
    }

    /// Adds a field of the JSON object that the table does not show.
    pub(crate) fn field<V: Into<Value>>(
        self,
        field: &'static str,
        value: impl Fn(&T) -> V + 'static,
    ) -> Self {
        self.add(field, value, None, None)
    }

    /// Adds a field that the table shows.
    pub(crate) fn column<V: Into<Value>>(
        self,
        field: &'static str,
        value: impl Fn(&T) -> V + 'static,
        cell: Cell,
    ) -> Self {
        self.add(field, value, Some(cell), None)
    }

    /// Adds a field that the table shows by a text of its own.
    pub(crate) fn written<V: Into<Value>>(
        self,
        field: &'static str,
        value: impl Fn(&T) -> V + 'static,
        cell: Cell,
        text: impl Fn(&T) -> String + 'static,
    ) -> Self {
        self.add(field, value, Some(cell), Some(Box::new(text)))
    }

    /// Adds a column that only the table has.
    pub(crate) fn cell(self, cell: Cell, text: impl Fn(&T) -> String + 'static) -> Self {
        self.add("", |_| Value::Omitted, Some(cell), Some(Box::new(text)))
    }

    fn add<V: Into<Value>>(
        mut self,
        field: &'static str,
        value: impl Fn(&T) -> V + 'static,
        cell: Option<Cell>,
        text: Option<RowText<T>>,
    ) -> Self {
        let value = Box::new(move |row: &T| value(row).into());
        self.columns.push(Column { field, value, cell, text });
        self
    }

    /// Sets the order of the table's columns by their fields.
    pub(crate) fn order(self, order: &[&'static str]) -> Self {
        Layout { order: order.to_vec(), ..self }
    }

    /// Adds text behind the last column, with a heading.
    pub(crate) fn tail(self, heading: &'static str, text: impl Fn(&T) -> String + 'static) -> Self {
        Layout { tail: Some(Tail { heading, text: Box::new(text) }), ..self }
    }

    /// Sets the text below the table.
    pub(crate) fn legend(self, legend: impl Into<String>) -> Self {
        Layout { legend: legend.into(), ..self }
    }

    /// Returns the text below the table; empty if there is none.
    pub(crate) fn legend_text(&self) -> &str {
        &self.legend
    }

    /// Returns the table's columns from left to right.
    fn cells(&self) -> Vec<(&Column<T>, &Cell)> {
        let columns = self.columns.iter();
        let mut cells: Vec<(&Column<T>, &Cell)> =
            columns.filter_map(|column| Some((column, column.cell.as_ref()?))).collect();
        let place = |column: &Column<T>| self.order.iter().position(|field| *field == column.field);
        // The sort is stable: columns that the order does not name keep their place at the end.
        cells.sort_by_key(|(column, _)| place(column).unwrap_or(self.order.len()));
        cells
    }

    /// Returns the headings of the table's columns.
    pub(crate) fn headings(&self) -> Vec<&'static str> {
        self.cells().into_iter().map(|(_, cell)| cell.heading).collect()
    }

    /// Returns the texts of a row's cells, without padding.
    pub(crate) fn texts(&self, row: &T) -> Vec<String> {
        self.cells().into_iter().map(|(column, cell)| column.text_of(row, cell)).collect()
    }

    /// Returns the heading of the table as one line.
    pub(crate) fn heading(&self) -> String {
        let heading = |(_, cell): (_, &Cell)| cell.pad(cell.heading);
        let cells: Vec<String> = self.cells().into_iter().map(heading).collect();
        let tail = self.tail.as_ref().map_or("", |tail| tail.heading);
        format!("{}{tail}", cells.join(" "))
    }

    /// Formats a row as a line of the table.
    pub(crate) fn line(&self, row: &T) -> String {
        let cells = self.cells();
        let text = |(column, cell): (&Column<T>, &Cell)| cell.pad(&column.text_of(row, cell));
        let cells: Vec<String> = cells.into_iter().map(text).collect();
        let mut line = cells.join(" ");
        if let Some(tail) = &self.tail {
            line += &(tail.text)(row);
        }
        line.truncate(line.trim_end().len());
        line
    }

    /// Formats all rows as a table with its heading.
    pub(crate) fn table(&self, rows: &[T]) -> String {
        let lines = rows.iter().map(|row| self.line(row));
        let lines: Vec<String> = [self.heading()].into_iter().chain(lines).collect();
        lines.join("\n") + "\n"
    }

    /// Returns the row as a JSON object on one line.
    ///
    /// # Errors
    ///
    /// Returns an error if a value has no JSON form.
    pub(crate) fn json(&self, row: &T) -> serde_json::Result<String> {
        serde_json::to_string(&Object { layout: self, row })
    }
}

impl<T> Column<T> {
    fn text_of(&self, row: &T, cell: &Cell) -> String {
        match &self.text {
            Some(text) => text(row),
            None => (self.value)(row).text(cell.unit, cell.digits),
        }
    }
}

/// Row as a JSON object.
struct Object<'a, T> {
    layout: &'a Layout<T>,
    row: &'a T,
}

impl<T> Serialize for Object<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_map(None)?;
        for column in &self.layout.columns {
            let value = (column.value)(self.row);
            if !value.is_omitted() {
                object.serialize_entry(column.field, &value)?;
            }
        }
        object.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sample {
        name: &'static str,
        rate: f64,
        lost: Option<u64>,
    }

    fn layout() -> Layout<Sample> {
        Layout::new()
            .column("rate", |s: &Sample| s.rate, right("k/s", 8).unit(1e3).digits(1))
            .field("size", |_| 64u32)
            .column("name", |s| s.name, left("name", 6))
            .written(
                "lost",
                |s| Value::if_some(s.lost),
                right("lost", 6),
                |s| s.lost.map_or_else(|| "none".to_owned(), |lost| lost.to_string()),
            )
            .order(&["name"])
            .tail("  notes", |s| if s.rate > 1e6 { "  fast".to_owned() } else { String::new() })
    }

    #[test]
    fn json_keeps_the_order_of_fields_and_omits_absent_ones() {
        let row = Sample { name: "a", rate: 2000.0, lost: None };
        assert_eq!(layout().json(&row).unwrap(), r#"{"rate":2000.0,"size":64,"name":"a"}"#);
        let row = Sample { lost: Some(3), ..row };
        assert!(layout().json(&row).unwrap().ends_with(r#""name":"a","lost":3}"#));
    }

    #[test]
    fn table_has_columns_in_its_own_order_and_the_tail_last() {
        let row = Sample { name: "a", rate: 2e6, lost: None };
        assert_eq!(layout().heading(), "name        k/s   lost  notes");
        assert_eq!(layout().line(&row), "a        2000.0   none  fast");
        assert_eq!(layout().texts(&row), ["a", "2000.0", "none"]);
        let slow = Sample { rate: 1.0, ..row };
        assert_eq!(layout().line(&slow), "a           0.0   none");
    }
}
