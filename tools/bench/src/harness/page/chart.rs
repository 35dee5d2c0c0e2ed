//! Bar charts: the median of each case's runs with their spread, and the published value.
//!
//! A chart is drawn without a view box: heights are pixels and horizontal places are percentages, so the text keeps its
//! size on a screen of any width. Each bar has its name above it.
//!
//! ```text
//!  64 bytes                       name of the group
//!  staging              3.10, published 3.64
//!  ████████├──┤██    ┊            bar to the median; least to greatest run; published value
//!  0       1       2       3      marks
//! ```

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::escape;
use crate::harness::median;

/// Bar chart. Its form is part of the format of `ringfence-bench report --save`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BarChart {
    /// Name for programs, unique within a section.
    pub(crate) id: String,
    pub(crate) title: String,
    pub(crate) unit: String,
    #[serde(default)]
    pub(crate) less_is_better: bool,
    pub(crate) groups: Vec<BarGroup>,
}

/// Bars that are compared with each other.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BarGroup {
    pub(crate) name: String,
    pub(crate) bars: Vec<Bar>,
}

/// Runs of one case.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Bar {
    pub(crate) name: String,
    /// Value of each round.
    pub(crate) values: Vec<f64>,
    /// Value of the source document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) published: Option<f64>,
    /// Set for Ringfence, not for a program beside it.
    pub(crate) ours: bool,
}

/// Height of a line of text, of a bar, and of the space below it, in pixels.
const LINE: u32 = 18;
const BAR: u32 = 14;
const SPACE: u32 = 12;
/// Height of the marks below the bars.
const AXIS: u32 = 20;
/// Characters of a name and a value that fit side by side on a screen of 360 pixels.
const SIDE_BY_SIDE: usize = 42;
/// Width of a drawing on that screen, and of a character of a mark, in pixels.
const SCREEN: f64 = 328.0;
const CHARACTER: f64 = 8.0;
/// Width of a drawing in a file of its own, in pixels.
const FILE_WIDTH: u32 = 720;
/// Colours and sizes of a file of its own.
const FILE_STYLE: &str = include_str!("chart.css");
/// Share of the width that the greatest value takes.
const FULL: f64 = 97.0;

impl Bar {
    /// Returns the median; `None` without values.
    pub(crate) fn median(&self) -> Option<f64> {
        (!self.values.is_empty()).then(|| median(self.values.iter().copied()))
    }

    /// Returns the least and the greatest value of two or more.
    pub(crate) fn range(&self) -> Option<(f64, f64)> {
        let least = self.values.iter().copied().fold(f64::INFINITY, f64::min);
        let greatest = self.values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        (self.values.len() > 1).then_some((least, greatest))
    }

    /// Returns the difference of the greatest and the least value of two or more.
    pub(crate) fn spread(&self) -> Option<f64> {
        self.range().map(|(least, greatest)| greatest - least)
    }

    /// Formats the median and the published value.
    fn label(&self) -> String {
        let value = self.median().map(number).unwrap_or_default();
        match self.published {
            Some(published) => format!("{value}, published {}", number(published)),
            None => value,
        }
    }
}

impl BarChart {
    /// Returns the bars that have values, with the names of their groups.
    fn drawn(&self) -> impl Iterator<Item = (&str, &Bar)> {
        let bars = self
            .groups
            .iter()
            .flat_map(|group| group.bars.iter().map(move |bar| (group.name.as_str(), bar)));
        bars.filter(|(_, bar)| !bar.values.is_empty())
    }

    /// Returns the title with the unit.
    pub(super) fn heading(&self) -> String {
        format!("{}, {}", self.title, self.unit)
    }

    /// Returns the explanation of the drawing.
    pub(super) fn key(&self) -> String {
        let better = if self.less_is_better { "Less" } else { "More" };
        let rounds = self.drawn().map(|(_, bar)| bar.values.len()).max().unwrap_or(0);
        let runs = match rounds {
            1 => "bar: one run".to_owned(),
            _ => format!("bar: median of {rounds} runs; line on it: least to greatest"),
        };
        let published = if self.drawn().any(|(_, bar)| bar.published.is_some()) {
            "; dashed line: published"
        } else {
            ""
        };
        format!("{better} is better. {}{published}.", capitalized(&runs))
    }

    /// Returns a sentence on the drawing, for readers that do not see it.
    pub(super) fn description(&self) -> String {
        let bars =
            self.drawn().map(|(group, bar)| format!("{group}, {}: {}", bar.name, bar.label()));
        let bars: Vec<String> = bars.collect();
        format!("Bar chart in {}. {}.", self.unit, bars.join("; "))
    }

    /// Returns heading and rows of the table with the chart's figures.
    pub(super) fn table(&self) -> ([&'static str; 7], Vec<Vec<String>>) {
        let optional = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), number);
        let row = |(group, bar): (&str, &Bar)| {
            let range = bar.range();
            vec![
                group.to_owned(),
                bar.name.clone(),
                optional(bar.median()),
                optional(range.map(|range| range.0)),
                optional(range.map(|range| range.1)),
                optional(bar.published),
                bar.values.len().to_string(),
            ]
        };
        let heading = ["case", "bar", "median", "least", "greatest", "published", "runs"];
        (heading, self.drawn().map(row).collect())
    }

    /// Draws the chart as a file of its own, with the colours of a page; `None` without values.
    pub(crate) fn file(&self) -> Option<String> {
        let (height, marks) = self.drawing()?;
        let (title, description, key) =
            (escape(&self.heading()), escape(&self.description()), escape(&self.key()));
        // Room around the drawing, and for the lines above and below it.
        let (above, below, side) = (2 * LINE, 2 * LINE, SPACE);
        let (width, all) = (FILE_WIDTH + 2 * side, above + height + below);
        let style = FILE_STYLE.trim_end();
        Some(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{all}\" viewBox=\"0 0 {width} {all}\" \
             role=\"img\" aria-labelledby=\"t d\">\n<title id=\"t\">{title}</title>\n<desc id=\"d\">{description}</desc>\n\
             <style>\n{style}\n</style>\n<rect class=\"back\" width=\"{width}\" height=\"{all}\"/>\n\
             <text class=\"group\" x=\"{side}\" y=\"{y}\">{title}</text>\n\
             <svg x=\"{side}\" y=\"{above}\" width=\"{FILE_WIDTH}\" height=\"{height}\">\n{marks}</svg>\n\
             <text class=\"mark\" x=\"{side}\" y=\"{last}\">{key}</text>\n</svg>\n",
            y = LINE + 4,
            last = all - SPACE,
        ))
    }

    /// Draws the chart. Returns the attributes of its size and its content; `None` without values.
    pub(super) fn marks(&self) -> Option<(String, String)> {
        let (height, marks) = self.drawing()?;
        Some((format!("width=\"100%\" height=\"{height}\""), marks))
    }

    /// Returns the height in pixels and the content of the drawing; `None` without values.
    fn drawing(&self) -> Option<(u32, String)> {
        let greatest = self
            .drawn()
            .flat_map(|(_, bar)| bar.values.iter().chain(&bar.published))
            .copied()
            .fold(f64::NEG_INFINITY, f64::max);
        if greatest == f64::NEG_INFINITY {
            return None;
        }
        let scale = PlaceScale { greatest: if greatest > 0.0 { greatest } else { 1.0 } };
        let (mut bars, mut y) = (String::new(), 0);
        for group in &self.groups {
            let mut is_first = true;
            for bar in group.bars.iter().filter(|bar| !bar.values.is_empty()) {
                if is_first && !group.name.is_empty() {
                    y += LINE;
                    text(&mut bars, ("0", y - 5), "group", "start", &group.name);
                }
                is_first = false;
                y = draw(&mut bars, bar, &scale, y);
            }
        }
        let mut all = scale.marks(y);
        all.push_str(&bars);
        Some((y + AXIS, all))
    }
}

fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

/// Draws a bar below `y`. Returns the place below it.
fn draw(svg: &mut String, bar: &Bar, scale: &PlaceScale, mut y: u32) -> u32 {
    let label = bar.label();
    y += LINE;
    text(svg, ("0", y - 5), "name", "start", &bar.name);
    if bar.name.chars().count() + label.chars().count() > SIDE_BY_SIDE {
        y += LINE;
    }
    text(svg, ("100%", y - 5), "value", "end", &label);
    let middle = y + BAR / 2;
    let class = if bar.ours { "ours" } else { "other" };
    let width = scale.percent(bar.median().unwrap_or_default());
    // Writing to a string cannot fail.
    let _ = writeln!(
        svg,
        "<rect class=\"bar {class}\" x=\"0\" y=\"{y}\" width=\"{width}\" height=\"{BAR}\"/>"
    );
    let (top, bottom) = (y - 2, y + BAR + 4);
    let _ = writeln!(svg, "<line class=\"base\" x1=\"0\" x2=\"0\" y1=\"{top}\" y2=\"{bottom}\"/>");
    if let Some((least, greatest)) = bar.range() {
        let (least, greatest) = (scale.percent(least), scale.percent(greatest));
        let mut line = |from: &str, to: &str, top: u32, bottom: u32| {
            let _ = writeln!(
                svg,
                "<line class=\"spread\" x1=\"{from}\" x2=\"{to}\" y1=\"{top}\" y2=\"{bottom}\"/>"
            );
        };
        line(&least, &greatest, middle, middle);
        line(&least, &least, y + 3, y + BAR - 3);
        line(&greatest, &greatest, y + 3, y + BAR - 3);
    }
    if let Some(published) = bar.published {
        let x = scale.percent(published);
        let _ = writeln!(
            svg,
            "<line class=\"line\" x1=\"{x}\" x2=\"{x}\" y1=\"{top}\" y2=\"{bottom}\"/>"
        );
    }
    y + BAR + SPACE
}

fn text(svg: &mut String, (x, y): (&str, u32), class: &str, anchor: &str, content: &str) {
    let content = escape(content);
    let _ = writeln!(
        svg,
        "<text class=\"{class}\" x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{content}</text>"
    );
}

/// Horizontal scale from 0 to the greatest value.
struct PlaceScale {
    greatest: f64,
}

impl PlaceScale {
    fn percent(&self, value: f64) -> String {
        format!("{:.2}%", (value / self.greatest).clamp(0.0, 1.0) * FULL)
    }

    /// Returns the distance of the marks: a round number, at most five marks, and room for their numbers on a small screen.
    fn step(&self) -> f64 {
        let longest = number(self.greatest).chars().count() as f64 * CHARACTER;
        // The last number may end at its mark, and the one before it is in the middle of its own.
        let room = (1.5 * longest + CHARACTER) / SCREEN * self.greatest;
        let raw = room.max(self.greatest / 4.0);
        let power = 10f64.powf(raw.log10().floor());
        let steps = [1.0, 2.0, 2.5, 5.0, 10.0].map(|n| n * power);
        steps.into_iter().find(|step| *step >= raw).unwrap_or(raw)
    }

    /// Draws vertical lines at round numbers, and the numbers below `bottom`.
    fn marks(&self, bottom: u32) -> String {
        let step = self.step();
        let mut svg = String::new();
        for n in 0..=4 {
            let value = step * f64::from(n);
            if value > self.greatest {
                break;
            }
            let x = self.percent(value);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{x}\" x2=\"{x}\" y1=\"0\" y2=\"{bottom}\"/>"
            );
            // A number in the middle of its line would leave the drawing on both sides.
            let label = number(value);
            let half = label.chars().count() as f64 * CHARACTER / 2.0;
            let anchor = match value / self.greatest * FULL / 100.0 * SCREEN {
                place if place < half => "start",
                place if place + half > SCREEN => "end",
                _ => "middle",
            };
            text(&mut svg, (&x, bottom + 14), "mark", anchor, &label);
        }
        svg
    }
}

/// Formats three significant digits or more, and whole numbers above 1000 with separators.
pub(crate) fn number(value: f64) -> String {
    let decimals = match value.abs() {
        size if size >= 99.95 || size == 0.0 => 0,
        size if size >= 9.995 => 1,
        size if size >= 0.9995 => 2,
        size if size >= 0.09995 => 3,
        size if size >= 0.009995 => 4,
        size if size >= 1e-6 => 6,
        _ => return format!("{value:e}"),
    };
    let digits = format!("{value:.decimals$}");
    if decimals > 0 {
        return digits;
    }
    let (sign, digits) = digits.strip_prefix('-').map_or(("", digits.as_str()), |rest| ("-", rest));
    let mut text = sign.to_owned();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(values: &[f64], published: Option<f64>) -> Bar {
        Bar { name: "staging".to_owned(), values: values.to_vec(), published, ours: true }
    }

    fn chart(bars: Vec<Bar>) -> BarChart {
        let groups = vec![BarGroup { name: "64 bytes".to_owned(), bars }];
        let (id, title) = ("rate".to_owned(), "Rate".to_owned());
        BarChart { id, title, unit: "Mpps".to_owned(), less_is_better: false, groups }
    }

    #[test]
    fn numbers_have_three_digits_and_separators() {
        for (value, wanted) in [
            (0.0, "0"),
            (3.1, "3.10"),
            (0.9996, "1.00"),
            (9.999, "10.0"),
            (31.26, "31.3"),
            (99.96, "100"),
            (0.25, "0.250"),
            (650_000.0, "650,000"),
            (1_234.5, "1,234"),
            (-1_234_567.0, "-1,234,567"),
            (0.0123, "0.0123"),
            (1e-9, "1e-9"),
        ] {
            assert_eq!(number(value), wanted);
        }
    }

    #[test]
    fn bar_ends_at_its_median_and_the_spread_at_the_extremes() {
        let (_, svg) = chart(vec![bar(&[4.0, 1.0, 2.0], None)]).marks().unwrap();
        assert!(svg.contains("width=\"48.50%\""), "2 of 4 is half of the full width: {svg}");
        assert!(svg.contains("x1=\"24.25%\" x2=\"97.00%\""), "from 1 to 4: {svg}");
        assert!(!svg.contains("class=\"line\""), "nothing was published: {svg}");
    }

    #[test]
    fn published_value_has_a_line_and_sets_the_scale() {
        let (_, svg) = chart(vec![bar(&[2.0, 2.0], Some(8.0))]).marks().unwrap();
        assert!(svg.contains("class=\"line\" x1=\"97.00%\""), "{svg}");
        assert!(svg.contains("width=\"24.25%\""), "{svg}");
        assert!(svg.contains(">2.00, published 8.00<"), "{svg}");
    }

    #[test]
    fn single_run_has_no_spread() {
        let one = chart(vec![bar(&[2.0], None)]);
        assert!(!one.marks().unwrap().1.contains("class=\"spread\""));
        assert!(one.key().contains("Bar: one run"), "{}", one.key());
        assert_eq!(
            (bar(&[2.0], None).spread(), bar(&[2.0, 5.0], None).spread()),
            (None, Some(3.0))
        );
        assert_eq!(one.table().1[0], ["64 bytes", "staging", "2.00", "-", "-", "-", "1"]);
    }

    #[test]
    fn chart_without_values_is_not_drawn_and_zero_has_no_bar() {
        assert!(chart(vec![bar(&[], Some(3.0))]).marks().is_none());
        let (_, svg) = chart(vec![bar(&[0.0, 0.0], None)]).marks().unwrap();
        assert!(svg.contains("width=\"0.00%\"") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn long_label_moves_to_a_line_of_its_own() {
        let height = |bar: Bar| chart(vec![bar]).marks().unwrap().0;
        let short = height(bar(&[2.0], None));
        let long = height(Bar { name: "n".repeat(SIDE_BY_SIDE), ..bar(&[2.0], None) });
        assert_eq!(
            (short.as_str(), long.as_str()),
            ("width=\"100%\" height=\"82\"", "width=\"100%\" height=\"100\"")
        );
    }

    #[test]
    fn description_and_table_have_every_figure() {
        let chart = chart(vec![bar(&[3.0, 2.0, 4.0], Some(5.0)), bar(&[1.0], None)]);
        let description = chart.description();
        assert!(description.contains("64 bytes, staging: 3.00, published 5.00"), "{description}");
        let (heading, rows) = chart.table();
        assert_eq!(rows.len(), 2);
        assert!(rows.iter().all(|row| row.len() == heading.len()));
        assert_eq!(rows[0], ["64 bytes", "staging", "3.00", "2.00", "4.00", "5.00", "3"]);
        assert!(chart.key().starts_with("More is better."), "{}", chart.key());
    }

    #[test]
    fn marks_are_round_numbers_up_to_the_greatest_value() {
        let marks = |greatest| {
            let svg = PlaceScale { greatest }.marks(10);
            let numbers = svg.split("</text>").filter_map(|part| part.rsplit_once('>'));
            numbers
                .map(|(_, number)| number.trim().to_owned())
                .filter(|n| !n.is_empty())
                .collect::<Vec<_>>()
        };
        assert_eq!(marks(7.0), ["0", "2.00", "4.00", "6.00"]);
        assert_eq!(marks(31.0), ["0", "10.0", "20.0", "30.0"]);
        // Numbers of nine characters have room for two marks and 0.
        assert_eq!(marks(1_000_000.0), ["0", "500,000", "1,000,000"]);
        for greatest in [1e-9, 1.0, 1e12] {
            assert!((2..=5).contains(&marks(greatest).len()), "{greatest}");
        }
    }
}
