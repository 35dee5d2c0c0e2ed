//! File of a report's figures: one JSON object, written by `--save` and read by `--from` and `--compare`.
//!
//! The object names its format and version. A reader refuses other versions, unknown fields, and figures that cannot be
//! drawn, so that a page never shows a part of a file. A change of the form needs a new [`VERSION`].

use std::collections::HashSet;
use std::path::Path;

use anyhow::{Context, ensure};
use ringfence_hostnet::text::printable_lines as printable;
use serde::{Deserialize, Serialize};

use super::args::SectionName;
use crate::harness::{Bar, BarChart};

/// Value of the field `format`.
const FORMAT: &str = "ringfence-bench report";
/// Version of the format.
const VERSION: u32 = 1;
/// Maximum size of a file, in bytes.
const FILE_MAX: u64 = 16 << 20;

/// Figures of a run, with the machine and the programs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Document {
    format: String,
    version: u32,
    pub(super) run: RunFacts,
    /// Machine: names and values.
    pub(super) machine: Vec<(String, String)>,
    /// Programs that took part, with their versions.
    pub(super) programs: Vec<(String, String)>,
    pub(super) sections: Vec<Section>,
}

/// Circumstances of a run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RunFacts {
    /// Time of its start, as in RFC 3339.
    pub(super) began: String,
    /// Words behind `ringfence-bench`.
    pub(super) command: String,
    pub(super) rounds: u32,
    pub(super) quick: bool,
    /// Share of the machine's processor time that was in use before the first round and after the last one.
    pub(super) busy_before: f64,
    pub(super) busy_after: f64,
}

/// One command and the charts of its rows.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Section {
    pub(super) name: SectionName,
    pub(super) title: String,
    pub(super) about: String,
    /// Lines of a shell that measure the section once.
    pub(super) command: String,
    pub(super) outcome: Outcome,
    /// Programs and cases that were left out, with the reasons.
    pub(super) notes: Vec<String>,
    pub(super) charts: Vec<BarChart>,
}

/// End of a section's measurement.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Outcome {
    Measured,
    /// The machine lacks a prerequisite.
    Skipped(String),
    /// The command failed.
    Failed(String),
}

/// Figure of a document with its names.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Figure<'a> {
    pub(super) section: &'a Section,
    pub(super) chart: &'a BarChart,
    pub(super) group: &'a str,
    pub(super) bar: &'a Bar,
}

impl<'a> Figure<'a> {
    /// Returns the names that identify the figure in every run.
    pub(super) fn key(self) -> (SectionName, &'a str, &'a str, &'a str) {
        (self.section.name, &self.chart.id, self.group, &self.bar.name)
    }

    /// Returns the names for a reader.
    pub(super) fn name(&self) -> String {
        let names = [self.chart.title.as_str(), self.group, &self.bar.name];
        names.into_iter().filter(|name| !name.is_empty()).collect::<Vec<_>>().join(", ")
    }
}

impl Document {
    pub(super) fn new(
        run: RunFacts,
        machine: Vec<(String, String)>,
        programs: Vec<(String, String)>,
        sections: Vec<Section>,
    ) -> Document {
        let format = FORMAT.to_owned();
        Document { format, version: VERSION, run, machine, programs, sections }
    }

    /// Returns every figure with its names.
    pub(super) fn figures(&self) -> impl Iterator<Item = Figure<'_>> {
        self.sections.iter().flat_map(|section| {
            section.charts.iter().flat_map(move |chart| {
                chart.groups.iter().flat_map(move |group| {
                    let name = group.name.as_str();
                    group.bars.iter().map(move |bar| Figure { section, chart, group: name, bar })
                })
            })
        })
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be read or has another format or version.
    pub(super) fn read(path: &Path) -> anyhow::Result<Document> {
        let read = || {
            let size = std::fs::metadata(path)?.len();
            ensure!(size <= FILE_MAX, "the file has {size} bytes, and {FILE_MAX} are the limit");
            Document::parse(&std::fs::read_to_string(path)?)
        };
        read().with_context(|| path.display().to_string())
    }

    /// Parses the text of a file.
    pub(super) fn parse(text: &str) -> anyhow::Result<Document> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u32,
        }
        let none = "it is no file of `ringfence-bench report --save`";
        // The version comes first: another one may have other fields.
        let head: Head = serde_json::from_str(text).context(none)?;
        ensure!(head.format == FORMAT, "{none}: its format is {:?}", head.format);
        ensure!(
            head.version == VERSION,
            "the file has version {} of the format, and this program reads version {VERSION}: use \
             the program that wrote it, or measure again",
            head.version
        );
        let document: Document = serde_json::from_str(text)?;
        document.check()?;
        Ok(document)
    }

    /// Checks what the types do not: figures that a chart can show, under names that differ and that a terminal can show.
    fn check(&self) -> anyhow::Result<()> {
        let mut known = HashSet::new();
        let facts =
            self.machine.iter().chain(&self.programs).flat_map(|(name, value)| [name, value]);
        let reasons = self.sections.iter().map(|section| match &section.outcome {
            Outcome::Measured => &section.title,
            Outcome::Skipped(why) | Outcome::Failed(why) => why,
        });
        let texts = facts.chain(reasons).chain([&self.run.began, &self.run.command]);
        let figures =
            self.figures().map(|figure| format!("{} {}", figure.name(), figure.chart.unit));
        for text in texts.cloned().chain(figures) {
            ensure!(printable(&text) == text, "{text:?} has a character that acts on a terminal");
        }
        for figure in self.figures() {
            let name = figure.name();
            ensure!(known.insert(figure.key()), "the figure {name:?} is there twice");
            let values = figure.bar.values.iter().chain(&figure.bar.published);
            for value in values {
                ensure!(value.is_finite() && *value >= 0.0, "{name:?} has the value {value}");
            }
        }
        Ok(())
    }

    /// Writes the file, which is whole at any moment.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be written.
    pub(super) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        let written = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, path));
        written.with_context(|| format!("writing {}", path.display()))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::harness::BarGroup;

    /// Builds a document with a chart of two bars, of these values.
    pub(in super::super) fn document(ours: &[f64], other: &[f64]) -> Document {
        let bar = |name: &str, values: &[f64], ours: bool| Bar {
            name: name.to_owned(),
            values: values.to_vec(),
            published: ours.then_some(3.64),
            ours,
        };
        let chart = BarChart {
            id: "rate".to_owned(),
            title: "Packets a second".to_owned(),
            unit: "Mpps".to_owned(),
            less_is_better: false,
            groups: vec![BarGroup {
                name: "64 bytes".to_owned(),
                bars: vec![bar("staging", ours, true), bar("memif", other, false)],
            }],
        };
        let section = |name, outcome, charts| Section {
            name,
            title: "Staged <pages>".to_owned(),
            about: "Packets.".to_owned(),
            command: "ringfence-bench net --json".to_owned(),
            outcome,
            notes: vec!["vhost-user is left out".to_owned()],
            charts,
        };
        let run = RunFacts {
            began: "2026-11-28T06:40:00.000Z".to_owned(),
            command: "report".to_owned(),
            rounds: 3,
            quick: false,
            busy_before: 0.01,
            busy_after: 0.02,
        };
        let fact = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        Document::new(
            run,
            vec![fact("processor", "one & two")],
            vec![fact("ringfence-bench", "0.1")],
            vec![
                section(SectionName::Staging, Outcome::Measured, vec![chart]),
                section(SectionName::Vhost, Outcome::Skipped("no root".to_owned()), vec![]),
                section(SectionName::Gso, Outcome::Failed("exit status: 1".to_owned()), vec![]),
            ],
        )
    }

    fn text() -> String {
        serde_json::to_string(&document(&[3.0, 2.0, 4.0], &[1.0])).unwrap()
    }

    #[test]
    fn document_survives_a_round_trip_and_names_its_version() {
        let text = text();
        assert!(text.starts_with(r#"{"format":"ringfence-bench report","version":1,"#), "{text}");
        assert!(text.contains(r#""outcome":{"skipped":"no root"}"#), "{text}");
        assert!(
            text.contains(
                r#""name":"staging","values":[3.0,2.0,4.0],"published":3.64,"ours":true"#
            )
        );
        assert_eq!(Document::parse(&text).unwrap(), document(&[3.0, 2.0, 4.0], &[1.0]));
        let file = tempfile::NamedTempFile::new().unwrap();
        document(&[1.0], &[2.0]).write(file.path()).unwrap();
        assert_eq!(Document::read(file.path()).unwrap(), document(&[1.0], &[2.0]));
    }

    #[test]
    fn other_version_format_or_form_is_refused_with_the_reason() {
        for (from, to, wanted) in [
            (r#""version":1"#, r#""version":2"#, "version 2"),
            // Another version is named even if the rest of its form is unknown.
            (r#""version":1"#, r#""version":7,"more":1"#, "version 7"),
            ("ringfence-bench report", "another", "its format is \"another\""),
            (r#""version":1,"#, "", "no file of `ringfence-bench report --save`"),
            (r#""version":1"#, r#""version":1,"more":1"#, "unknown field `more`"),
            ("3.64", "1e999", "number out of range"),
            ("3.64", "-1.0", "has the value -1"),
            (r#""name":"memif""#, r#""name":"staging""#, "is there twice"),
            ("memif", "\\u001b[2J", "acts on a terminal"),
            ("one & two", "\\u202e", "acts on a terminal"),
        ] {
            let changed = text().replacen(from, to, 1);
            let error = Document::parse(&changed).unwrap_err();
            assert!(format!("{error:#}").contains(wanted), "{wanted}: {error:#}");
        }
        assert!(Document::parse("").is_err());
        let missing = Document::read(Path::new("/nonexistent/report.json")).unwrap_err();
        assert!(format!("{missing:#}").contains("/nonexistent/report.json"), "{missing:#}");
    }

    proptest! {
        /// A damaged file is refused, or is a document whose page has no number that cannot be drawn.
        #[test]
        fn damaged_document_is_refused_or_drawn(at in 0usize..2000, byte in any::<u8>()) {
            let mut bytes = text().into_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(document) = Document::parse(&String::from_utf8_lossy(&bytes)) {
                let page = super::super::page::page(&document, None).finish();
                prop_assert!(!page.contains("NaN") && !page.contains("inf%"));
            }
        }

        /// Names of any characters appear as text, never as elements.
        #[test]
        fn names_of_any_characters_make_no_element(name in ".*", value in 0.0..1e300f64) {
            let plain = document(&[value], &[value, 0.0]);
            let mut document = plain.clone();
            let chart = &mut document.sections[0].charts[0];
            chart.groups[0].bars[0].name = name.clone();
            chart.unit = name.clone();
            document.machine[0].1 = name.clone();
            document.sections[0].command = name;
            let plain = super::super::page::page(&plain, None);
            let page = super::super::page::page(&document, None).finish();
            prop_assert_eq!(page.matches('<').count(), plain.finish().matches('<').count());
        }
    }
}
