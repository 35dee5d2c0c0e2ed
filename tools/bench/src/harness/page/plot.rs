//! Plots: series of points over one axis, drawn as SVG.
//!
//! Axes are drawn by `plotters` over transformed values (a logarithm, the index of a name) and labelled
//! with the original ones. One coordinate type thus serves every scale.

use std::ops::Range;

use anyhow::anyhow;
use plotters::chart::{ChartBuilder, ChartContext, LabelAreaPosition, SeriesLabelPosition};
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::{
    Cartesian2d, Circle, IntoDrawingArea, LineSeries, PathElement, Rectangle, SVGBackend,
};
use plotters::style::{BLACK, Color, RGBColor, WHITE};

/// Width and height of the drawing; the page scales it.
const SIZE: (u32, u32) = (900, 420);
/// Width of all bars of one name, as a fraction of the distance between names.
const BARS: f64 = 0.8;
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
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Scale {
    /// Linear from 0, or from the minimum value if that is negative.
    Linear,
    /// Logarithmic. Values must be above 0; others are omitted.
    Log,
    /// Names: the value of a point is the index of its name. For the horizontal axis; points are
    /// drawn as bars.
    Names(Vec<String>),
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
        let base = y.from;
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
            let colour = COLOURS[number % COLOURS.len()];
            match self.x.scale {
                Scale::Names(_) => {
                    let group = Group { number, size: series.len() };
                    bars(&mut chart, one, group, base, colour)?;
                }
                _ => lines(&mut chart, one, colour)?,
            }
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

/// Place of a bar beside the others at the same name.
#[derive(Clone, Copy)]
struct Group {
    /// Bars to the left of it.
    number: usize,
    /// Bars of the group.
    size: usize,
}

fn bars(
    chart: &mut Chart<'_, '_>,
    series: &Series,
    group: Group,
    base: f64,
    colour: RGBColor,
) -> Result<(), String> {
    let width = BARS / group.size.max(1) as f64;
    let left = width * group.number as f64 - BARS / 2.0;
    let bar = |(x, y): &(f64, f64)| {
        Rectangle::new([(x + left, base), (x + left + width, *y)], colour.filled())
    };
    chart
        .draw_series(series.points.iter().map(bar))
        .map_err(said)?
        .label(&series.name)
        .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 12, y + 4)], colour.filled()));
    Ok(())
}

impl Scale {
    /// Returns the coordinate of a value.
    fn place(&self, value: f64) -> Option<f64> {
        match self {
            _ if !value.is_finite() => None,
            Scale::Linear | Scale::Names(_) => Some(value),
            Scale::Log => (value > 0.0).then(|| value.log2()),
        }
    }

    /// Returns the label of a coordinate.
    fn label(&self, place: f64) -> String {
        match self {
            Scale::Linear => number(place),
            Scale::Log => number(place.exp2()),
            Scale::Names(names) => {
                let at = (0..).zip(names).find(|(n, _)| (f64::from(*n) - place).abs() < 0.01);
                at.map(|(_, name)| name.clone()).unwrap_or_default()
            }
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
            Scale::Names(names) => {
                let marks: Vec<f64> = (0..).take(names.len()).map(f64::from).collect();
                Extent { from: -0.5, to: marks.len() as f64 - 0.5, marks }
            }
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
        let names = Scale::Names(vec!["copy".into(), "map".into()]);
        assert_eq!((names.label(1.0), names.label(0.5)), ("map".into(), String::new()));
        assert_eq!(Scale::Log.place(0.0), None);
        assert_eq!(Scale::Linear.place(f64::NAN), None);
    }

    #[test]
    fn bars_and_lines_are_drawn() {
        let plot = |scale| Plot {
            title: "t".into(),
            x: Axis::new("mode", scale),
            y: Axis::linear("Gbit/s"),
            series: vec![Series::new("one", vec![(0.0, 1.0), (1.0, 2.0)])],
        };
        let bars = plot(Scale::Names(vec!["a".into(), "b".into()])).svg().unwrap().unwrap();
        assert!(bars.matches("<rect").count() >= 3, "{bars}");
        let lines = plot(Scale::Linear).svg().unwrap().unwrap();
        assert!(lines.contains("<polyline") && lines.contains("<circle"), "{lines}");
    }
}
