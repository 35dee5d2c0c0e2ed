//! Plots: series of points over one axis, drawn as SVG.
//!
//! Axes are drawn by `plotters` over transformed values, such as a logarithm, and labelled with the original ones. One
//! coordinate type thus serves every scale.

use std::ops::Range;

use anyhow::anyhow;
use plotters::chart::{ChartBuilder, ChartContext, LabelAreaPosition, SeriesLabelPosition};
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::{
    Cartesian2d, Circle, IntoDrawingArea, LineSeries, PathElement, SVGBackend,
};
use plotters::style::{BLACK, Color, RGBColor, WHITE};

/// Width and height of the drawing; the page scales it.
const SIZE: (u32, u32) = (900, 420);
/// Colours that colour-blind readers can distinguish (Okabe and Ito).
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
    RGBColor(120, 120, 120),
];

/// Scale of an axis: the distance of two values, and the texts of its marks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scale {
    /// Linear from 0, or from the minimum value if that is negative.
    Linear,
    /// Logarithmic. Values must be above 0; others are omitted.
    Log,
}

/// Named series of points.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Series {
    name: String,
    points: Vec<(f64, f64)>,
}

impl Series {
    pub(crate) fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Series {
        Series { name: name.into(), points }
    }
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Axis {
    pub(crate) label: &'static str,
    pub(crate) scale: Scale,
}

impl Axis {
    pub(crate) fn new(label: &'static str, scale: Scale) -> Axis {
        Axis { label, scale }
    }

    pub(crate) fn linear(label: &'static str) -> Axis {
        Axis::new(label, Scale::Linear)
    }
}

/// Plot with a label and a scale for each axis.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) series: Vec<Series>,
}

type Coordinates = Cartesian2d<Extent, Extent>;

impl Plot {
    /// Draws the plot; `None` without points.
    pub(crate) fn svg(&self) -> anyhow::Result<Option<String>> {
        let series: Vec<Series> =
            self.series.iter().map(|series| self.transformed(series)).collect();
        let all = || series.iter().flat_map(|series| &series.points);
        let (Some(x), Some(y)) = (
            Extent::of(&self.x.scale, all().map(|point| point.0)),
            Extent::of(&self.y.scale, all().map(|point| point.1)),
        ) else {
            return Ok(None);
        };
        let mut svg = String::new();
        self.draw(&mut svg, &series, x, y).map_err(|error| anyhow!("a plot: {error}"))?;
        Ok(Some(svg))
    }

    /// Returns a sentence with every point, for readers that do not see the plot.
    pub(super) fn description(&self) -> String {
        let point = |(x, y): &(f64, f64)| format!("{}: {}", number(*x), number(*y));
        let line = |series: &Series| {
            let points: Vec<String> = series.points.iter().map(point).collect();
            format!("{}: {}", series.name, points.join(", "))
        };
        let lines: Vec<String> = self.series.iter().map(line).collect();
        format!("{} over {}. {}.", self.y.label, self.x.label, lines.join("; "))
    }

    /// Converts points to the plot's coordinates; omits points outside the scale.
    fn transformed(&self, series: &Series) -> Series {
        let of = |(x, y): &(f64, f64)| Some((self.x.scale.place(*x)?, self.y.scale.place(*y)?));
        Series { name: series.name.clone(), points: series.points.iter().filter_map(of).collect() }
    }

    fn draw(
        &self,
        svg: &mut String,
        series: &[Series],
        x: Extent,
        y: Extent,
    ) -> Result<(), String> {
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(said)?;
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .caption(&self.title, ("sans-serif", 20))
            .set_label_area_size(LabelAreaPosition::Left, 64)
            .set_label_area_size(LabelAreaPosition::Bottom, 44)
            .build_cartesian_2d(x, y)
            .map_err(said)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .bold_line_style(BLACK.mix(0.12))
            .x_desc(self.x.label)
            .y_desc(self.y.label)
            .x_label_formatter(&|place| self.x.scale.label(*place))
            .y_label_formatter(&|place| self.y.scale.label(*place))
            .draw()
            .map_err(said)?;
        for (number, one) in series.iter().enumerate() {
            lines(&mut chart, one, COLOURS[number % COLOURS.len()])?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()
            .map_err(said)?;
        area.present().map_err(said)
    }
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Coordinates>;

fn lines(chart: &mut Chart<'_, '_>, series: &Series, colour: RGBColor) -> Result<(), String> {
    let mut points = series.points.clone();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    chart
        .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))
        .map_err(said)?
        .label(&series.name)
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    let dots = points.iter().map(|point| Circle::new(*point, 3, colour.filled()));
    chart.draw_series(dots).map_err(said).map(drop)
}

impl Scale {
    /// Returns the coordinate of a value.
    fn place(&self, value: f64) -> Option<f64> {
        match self {
            _ if !value.is_finite() => None,
            Scale::Linear => Some(value),
            Scale::Log => (value > 0.0).then(|| value.log2()),
        }
    }

    /// Returns the label of a coordinate.
    fn label(&self, place: f64) -> String {
        match self {
            Scale::Linear => number(place),
            Scale::Log => number(place.exp2()),
        }
    }
}

/// Formats three significant digits without trailing zeros.
fn number(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 100.0 || v == 0.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        v if v >= 0.1 => 3,
        _ => 5,
    };
    let text = format!("{value:.decimals$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// Range of an axis and positions of its marks.
#[derive(Clone, Debug)]
struct Extent {
    from: f64,
    to: f64,
    marks: Vec<f64>,
}

/// Maximum number of marks on an axis.
const MARKS: u32 = 14;

impl Extent {
    fn of(scale: &Scale, places: impl Iterator<Item = f64>) -> Option<Extent> {
        let (least, most) = places
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), place| {
                (least.min(place), most.max(place))
            });
        if least > most {
            return None;
        }
        Some(match scale {
            Scale::Log => Extent::stepped(least.floor(), most.ceil(), 1.0),
            Scale::Linear => {
                let (from, to) = (least.min(0.0), if most > 0.0 { most * 1.05 } else { 1.0 });
                let raw = (to - from) / 6.0;
                let power = 10f64.powf(raw.log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|s| *s >= raw);
                Extent::stepped(from, to, step.unwrap_or(raw))
            }
        })
    }

    fn stepped(from: f64, to: f64, step: f64) -> Extent {
        let to = if to > from { to } else { from + step };
        let many = ((to - from) / step / f64::from(MARKS)).ceil().max(1.0);
        let first = (from / step).ceil() * step;
        let marks = (0..=MARKS).map(|n| first + f64::from(n) * step * many);
        Extent { from, to, marks: marks.take_while(|mark| *mark <= to + step * 1e-6).collect() }
    }
}

impl Ranged for Extent {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        RangedCoordf64::from(self.from..self.to).map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.marks.clone() }
    }

    fn range(&self) -> Range<f64> {
        self.from..self.to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_numbers_within_the_axis() {
        let extent = Extent::of(&Scale::Linear, [0.4, 2.9].into_iter()).unwrap();
        assert_eq!((extent.from, extent.marks.len()), (0.0, 4), "{extent:?}");
        assert!(extent.marks.iter().all(|mark| *mark <= extent.to), "{extent:?}");
        let bytes = Extent::of(&Scale::Log, [6.0, 15.99].into_iter()).unwrap();
        assert_eq!((bytes.from, bytes.to, bytes.marks.len()), (6.0, 16.0, 11));
        // The number of marks is bounded for any magnitude.
        for most in [1e-9, 1.0, 1e18] {
            let extent = Extent::of(&Scale::Linear, [0.0, most].into_iter()).unwrap();
            assert!((2..=15).contains(&extent.marks.len()), "{extent:?}");
        }
        assert!(Extent::of(&Scale::Linear, std::iter::empty()).is_none());
    }

    #[test]
    fn labels_show_original_values() {
        assert_eq!(Scale::Log.label(6.0), "64");
        assert_eq!(Scale::Linear.label(2.5), "2.5");
        assert_eq!(Scale::Linear.label(0.0), "0");
        assert_eq!(Scale::Log.place(0.0), None);
        assert_eq!(Scale::Linear.place(f64::NAN), None);
    }

    #[test]
    fn points_are_drawn_as_a_line_and_named_in_the_description() {
        let plot = Plot {
            title: "t".into(),
            x: Axis::linear("guests"),
            y: Axis::linear("Gbit/s"),
            series: vec![Series::new("one", vec![(0.0, 1.0), (1.0, 2.0)])],
        };
        let svg = plot.svg().unwrap().unwrap();
        assert!(svg.contains("<polyline") && svg.contains("<circle"), "{svg}");
        assert_eq!(plot.description(), "Gbit/s over guests. one: 0: 1, 1: 2.");
    }
}
