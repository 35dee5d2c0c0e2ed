//! Page of a report.

use std::path::Path;

use anyhow::Context;
use clap::ValueEnum;

use super::compare::{self, Comparison};
use super::document::{Document, Outcome, Section};
use crate::harness::Page;

/// Builds the page of a run, with its comparison to an older one.
pub(super) fn page(document: &Document, comparison: Option<&Comparison>) -> Page {
    let mut page = Page::new("Ringfence, measured");
    let run = &document.run;
    page.text(&format!(
        "Measured {}, {}. Only ratios within one run are comparable between machines.",
        run.began,
        if run.rounds == 1 { "one round".to_owned() } else { format!("{} rounds", run.rounds) }
    ));
    if run.quick {
        page.note("A quick run tests this page. Its figures say nothing about the machine.");
    }
    if run.is_beside_load() {
        let [before, after] = [run.busy_before, run.busy_after].map(|share| share * 100.0);
        page.note(&format!(
            "Measured beside other load: {before:.0} % of the processor time was in use before the run, and \
             {after:.0} % after it. The figures are not those of a quiet machine."
        ));
    }
    if let Some(comparison) = comparison {
        changes(&mut page, comparison);
    }
    document.sections.iter().for_each(|one| section(&mut page, one));
    page.heading("Machine and programs");
    let rows = |facts: &[(String, String)]| -> Vec<Vec<String>> {
        facts.iter().map(|(name, value)| vec![name.clone(), value.clone()]).collect()
    };
    page.facts("Machine", &rows(&document.machine));
    page.facts("Programs", &rows(&document.programs));
    page.command("The command of this page:", &format!("ringfence-bench {}", run.command));
    page
}

/// Writes each chart as an SVG file of its own, named by section and chart.
pub(super) fn write_charts(document: &Document, folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    for section in &document.sections {
        let name = section.name.to_possible_value();
        let name = name.context("a section without a name")?.get_name().to_owned();
        for chart in &section.charts {
            let Some(svg) = chart.file() else { continue };
            // The identifiers are those of a file that may come from elsewhere.
            let id: String =
                chart.id.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
            let path = folder.join(format!("{name}-{id}.svg"));
            std::fs::write(&path, svg).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}

fn changes(page: &mut Page, comparison: &Comparison) {
    page.heading("Changes");
    page.text(&comparison.sentences());
    if !comparison.warnings.is_empty() {
        page.note(&format!("The runs differ: {}.", comparison.warnings.join("; ")));
    }
    if !comparison.changes.is_empty() {
        page.rows("Figures that changed", &compare::layout(), &comparison.changes);
        page.text(compare::LEGEND);
    }
}

fn section(page: &mut Page, section: &Section) {
    page.heading(&section.title);
    page.text(&section.about);
    match &section.outcome {
        Outcome::Measured => {}
        Outcome::Skipped(why) => page.note(&format!("Not measured: {why}.")),
        Outcome::Failed(why) => page.note(&format!("The command failed. {why}")),
    }
    section.charts.iter().for_each(|chart| page.chart(chart));
    let is_skipped = matches!(section.outcome, Outcome::Skipped(_));
    if !is_skipped && !section.notes.is_empty() {
        page.text(&format!("Left out: {}.", section.notes.join("; ")));
    }
    page.command("The command, once in each round:", &section.command);
}

#[cfg(test)]
mod tests {
    use super::super::document::tests::document;
    use super::*;

    #[test]
    fn page_has_charts_commands_machine_and_reasons() {
        let page = page(&document(&[3.0, 2.0, 4.0], &[1.0]), None).finish();
        for text in [
            "<title>Ringfence, measured</title>",
            "Staged &lt;pages&gt;",
            "3.00, published 3.64",
            "<code>ringfence-bench net --json</code>",
            "Not measured: no root.",
            "The command failed. exit status: 1",
            "one &amp; two",
            "<th scope=\"row\">64 bytes</th><td>staging</td><td>3.00</td><td>2.00</td><td>4.00</td>",
            "<code>ringfence-bench report</code>",
        ] {
            assert!(page.contains(text), "{text}: {page}");
        }
        assert_eq!(page.matches("<svg").count(), 1);
        assert!(!page.contains("beside other load") && !page.contains("quick run"), "{page}");
        assert!(!page.contains(">Changes<"), "{page}");
    }

    #[test]
    fn charts_are_files_of_their_own_whose_names_stay_in_the_folder() {
        let mut document = document(&[3.0, 2.0, 4.0], &[1.0]);
        document.sections[0].charts[0].id = "../rate 2".to_owned();
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("charts");
        write_charts(&document, &folder).unwrap();
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["staging-rate2.svg"]);
        let svg = std::fs::read_to_string(folder.join("staging-rate2.svg")).unwrap();
        assert!(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" "), "{svg}");
        for text in ["Packets a second, Mpps", "3.00, published 3.64", "prefers-color-scheme:dark"]
        {
            assert!(svg.contains(text), "{text}: {svg}");
        }
    }

    #[test]
    fn quick_run_and_load_are_noted() {
        let mut document = document(&[3.0], &[1.0]);
        document.run.quick = true;
        document.run.busy_after = 0.42;
        let page = page(&document, None).finish();
        assert!(page.contains("A quick run tests this page"), "{page}");
        assert!(
            page.contains("1 % of the processor time was in use before the run, and 42 %"),
            "{page}"
        );
    }

    #[test]
    fn changes_come_first_with_their_excess() {
        let old = document(&[1.0, 1.0], &[1.0, 1.0]);
        let new = document(&[3.0, 3.0], &[1.0, 1.0]);
        let page = page(&new, Some(&compare::compare(&old, &new))).finish();
        let changes = page.find("1 of 2 figures changed by more than the spread").unwrap();
        assert!(changes < page.find("Staged &lt;pages&gt;</h2>").unwrap());
        assert!(page.contains("<td>+200.0 %</td>"), "{page}");
    }
}
