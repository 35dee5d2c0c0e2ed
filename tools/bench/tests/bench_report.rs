//! End-to-end tests of `ringfence-bench report`: its page, its file, and the page in a browser. No rate is asserted.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use support::browser::{Browser, Screen};
use support::needs::Need;

/// Runs `report` with options separated by blanks, in a directory.
fn report(directory: &Path, options: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    command.arg("report").args(options.split_whitespace()).current_dir(directory);
    command.stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
fn rows(done: &Output) -> Vec<Value> {
    assert!(done.status.success(), "{}", text(&done.stderr));
    text(&done.stdout).lines().map(|row| serde_json::from_str(row).unwrap()).collect()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// Checks the criteria of a figure that hold on any machine.
#[track_caller]
fn check(row: &Value, rounds: usize) {
    let number = |field: &str| row[field].as_f64().unwrap_or_else(|| panic!("{field}: {row}"));
    assert!(number("least") <= number("median") && number("median") <= number("greatest"), "{row}");
    assert!(number("least") >= 0.0 && row["values"].as_array().unwrap().len() == rounds, "{row}");
}

#[test]
fn quick_report_writes_page_and_file_that_draws_it_again() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    let options = "--quick --only persistent --html page.html --save run.json --json";
    let measured = rows(&report(place.path(), options));
    assert_eq!(measured.len(), 4, "{measured:?}");
    measured.iter().for_each(|row| check(row, 2));
    assert_eq!(measured[0]["published"], 400_000.0 / 650_000.0);
    let page = read(&at("page.html"));
    for part in [
        "<svg role=\"img\"",
        "<code>ringfence-bench seeds persistent --json",
        "A quick run tests this page.",
        "<th scope=\"row\">processor</th>",
        options,
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    let file: Value = serde_json::from_str(&read(&at("run.json"))).unwrap();
    assert_eq!((&file["format"], &file["version"]), (&"ringfence-bench report".into(), &1.into()));
    assert_eq!(file["sections"][0]["outcome"], "measured");

    let drawn = rows(&report(place.path(), "--from run.json --html again.html --json"));
    assert_eq!(drawn, measured);
    assert_eq!(read(&at("again.html")), page);

    let drawn = report(place.path(), "--from run.json --html again.html --svg charts --json");
    assert_eq!(rows(&drawn), measured);
    let chart = read(&at("charts/persistent-scaling.svg"));
    assert!(chart.starts_with("<svg xmlns=") && chart.contains("class=\"line\""), "{chart}");

    // A run has not changed since itself.
    let same = report(place.path(), "--from run.json --compare run.json --html same.html");
    let said = text(&same.stdout);
    assert!(said.contains("0 of 4 figures changed by more than the spread"), "{said}");
    let twice = read(&at("run.json")).replace("\"published\": 0.6", "\"published\": -0.6");
    std::fs::write(at("bad.json"), twice).unwrap();
    let refused = report(place.path(), "--from bad.json --html bad.html");
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("bad.json: "), "{}", text(&refused.stderr));
    assert!(!at("bad.html").exists());
}

#[test]
fn failed_section_is_on_the_page_and_gives_exit_status_1() {
    let place = tempfile::tempdir().unwrap();
    // The files are there, so the section is measured, and they cannot be executed, so it fails.
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    let options = "report --quick --only disks --rounds 1 --html page.html";
    command.args(options.split_whitespace()).current_dir(place.path()).stdin(Stdio::null());
    let programs = place.path().join("programs");
    std::fs::create_dir(&programs).unwrap();
    for name in ["fio", "qemu-nbd"] {
        std::fs::write(programs.join(name), "no program\n").unwrap();
    }
    let done = command.env("PATH", &programs).output().unwrap();
    assert_eq!(done.status.code(), Some(1), "{}", text(&done.stderr));
    assert!(text(&done.stderr).contains("1 of 1 sections failed"), "{}", text(&done.stderr));
    let page = read(&place.path().join("page.html"));
    assert!(page.contains("The command failed. exit status: 1"), "{page}");
}

#[test]
fn program_that_is_missing_is_named_on_the_page() {
    let place = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    let options = "report --quick --only dpdk --html page.html";
    command.args(options.split_whitespace()).current_dir(place.path()).stdin(Stdio::null());
    let done = command.env("PATH", "/nonexistent").output().unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    let page = read(&place.path().join("page.html"));
    assert!(page.contains("Not measured: dpdk-testpmd is not installed."), "{page}");
}

#[test]
fn each_round_is_in_the_file_before_the_next_one_has_ended() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("run.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfence-bench"));
    let options = "report --quick --only persistent --rounds 100 --save run.json";
    command.args(options.split_whitespace()).current_dir(place.path());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut running = command.spawn().unwrap();
    while !file.exists() && running.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    // The measurement is cut short.
    running.kill().unwrap();
    running.wait().unwrap();
    let drawn = report(place.path(), "--from run.json --html page.html --json");
    let drawn = rows(&drawn);
    assert_eq!(drawn.len(), 4, "{drawn:?}");
    let page = read(&place.path().join("page.html"));
    assert!(!page.contains("100 rounds"), "{page}");
}

#[test]
#[ignore = "long: every section, twice"]
fn quick_report_of_the_whole_set_measures_each_section_or_names_a_reason() {
    let place = tempfile::tempdir().unwrap();
    let measured = rows(&report(place.path(), "--quick --save run.json --json"));
    measured.iter().for_each(|row| check(row, 2));
    let file: Value = serde_json::from_str(&read(&place.path().join("run.json"))).unwrap();
    let sections = file["sections"].as_array().unwrap();
    assert_eq!(sections.len(), 10);
    for section in sections {
        let charts = section["charts"].as_array().unwrap();
        let is_skipped = section["outcome"]["skipped"].is_string();
        assert!(is_skipped != (section["outcome"] == "measured"), "{section}");
        assert_eq!(is_skipped, charts.is_empty(), "{section}");
    }
    let page = read(&place.path().join("ringfence-report.html"));
    let charts: usize = sections.iter().map(|s| s["charts"].as_array().unwrap().len()).sum();
    assert_eq!(page.matches("<svg role=\"img\"").count(), charts);
}

/// Returns a page with every kind of content: charts of all sections, long names, changes, notes.
fn page_of_everything(place: &Path) -> PathBuf {
    let bar = |name: &str, values: &[f64], published: Option<f64>| {
        let mut bar =
            serde_json::json!({"name": name, "values": values, "ours": published.is_some()});
        if let Some(published) = published {
            bar["published"] = published.into();
        }
        bar
    };
    let section = |name: &str, outcome: Value, factor: f64| {
        let bars = [
            bar(
                "ringfence run --disk with a name that is long",
                &[3.0 * factor, 2.5 * factor, 3.4 * factor],
                Some(3.64),
            ),
            bar("qemu-storage-daemon", &[1e6, 1e6], None),
            bar("nothing", &[0.0, 0.0], None),
        ];
        let groups = serde_json::json!([{"name": "64 bytes, from the backend", "bars": bars}]);
        let command =
            format!("ringfence-bench seeds {name} --json {}", "--size 64,1500 ".repeat(9));
        serde_json::json!({
            "name": name, "title": format!("Section {name}: a title of more than one line on a telephone"),
            "about": "A paragraph. ".repeat(20), "command": command, "outcome": outcome, "notes": ["vhost-user: no cores"],
            "charts": [{"id": "c", "title": "A chart", "unit": "requests a second", "groups": groups}],
        })
    };
    let run = |factor: f64| {
        serde_json::json!({
            "format": "ringfence-bench report", "version": 1,
            "run": {"began": "2026-11-28T06:40:00.000Z", "command": "report", "rounds": 3, "quick": true,
                    "busy_before": 0.5, "busy_after": 0.5},
            "machine": [["processor", "A processor with a name of many words, as vendors like them, 3.0 GHz"]],
            "programs": [["qemu-nbd", "qemu-nbd 7.2.13 (Debian 1:7.2+dfsg-7+deb12u7)"]],
            "sections": [
                section("staging", "measured".into(), factor),
                section("vhost", serde_json::json!({"skipped": "there is no /dev/vhost-net"}), 1.0),
                section("gso", serde_json::json!({"failed": "x".repeat(300)}), 1.0),
            ],
        })
    };
    for (name, factor) in [("old.json", 1.0), ("new.json", 4.0)] {
        std::fs::write(place.join(name), run(factor).to_string()).unwrap();
    }
    report(place, "--from new.json --compare old.json --html page.html");
    place.join("page.html")
}

#[test]
#[ignore = "long: a browser draws the page in four sizes and colours"]
fn page_in_a_browser_has_no_error_fits_a_phone_and_has_contrast() {
    require!(Need::Program("chromium", "chromium"), Need::Program("unshare", "util-linux"));
    let place = tempfile::tempdir().unwrap();
    let page = page_of_everything(place.path());
    let mut browser = Browser::start(place.path());
    for (width, is_dark) in [(360, false), (360, true), (1280, false), (1280, true)] {
        let shown = browser.show(&page, Screen { width, height: 800, is_dark });
        let what = format!("{width} px, dark: {is_dark}");
        assert_eq!(shown["scheme"], if is_dark { "dark" } else { "light" }, "{what}");
        assert!(browser.errors().is_empty(), "{what}: {:?}", browser.errors());
        assert_eq!(shown["overflow"], 0, "{what}: wider than the screen by so many pixels");
        assert_eq!(shown["outside"], serde_json::json!([]), "{what}: beyond their drawing");
        assert_eq!(shown["overlaps"], serde_json::json!([]), "{what}: texts over each other");
        let charts = shown["charts"].as_array().unwrap();
        assert_eq!(charts.len(), 3, "{what}");
        for chart in charts {
            assert!(chart["width"].as_f64().unwrap() >= 300.0, "{what}: {chart}");
            assert!(
                chart["bars"].as_u64() == Some(3) && chart["lines"].as_u64() == Some(1),
                "{what}: {chart}"
            );
        }
        let texts = shown["contrast"].as_array().unwrap();
        assert!(texts.len() > 30, "{what}: {texts:?}");
        for text in texts {
            assert!(text["ratio"].as_f64().unwrap() >= 4.5, "{what}: {text}");
        }
        assert!(shown["smallest"].as_f64().unwrap() >= 12.0, "{what}: {}", shown["smallest"]);
    }
}

#[test]
#[ignore = "long: a browser"]
fn page_in_a_browser_serves_keyboard_and_screen_reader() {
    require!(Need::Program("chromium", "chromium"), Need::Program("unshare", "util-linux"));
    let place = tempfile::tempdir().unwrap();
    let page = page_of_everything(place.path());
    let mut browser = Browser::start(place.path());
    browser.show(&page, Screen { width: 360, height: 800, is_dark: false });
    let names = |nodes: &[(String, String)], role: &str| -> Vec<String> {
        nodes.iter().filter(|(is, _)| is == role).map(|(_, name)| name.clone()).collect()
    };
    let nodes = browser.accessible();
    assert_eq!(names(&nodes, "image"), ["A chart", "A chart", "A chart"], "{nodes:?}");
    let headings = names(&nodes, "heading");
    assert_eq!(headings[..2], ["Ringfence, measured", "Changes"], "{headings:?}");
    assert_eq!(names(&nodes, "main").len() + names(&nodes, "navigation").len(), 2, "{nodes:?}");
    assert!(names(&nodes, "table").iter().any(|name| name == "Figures that changed"), "{nodes:?}");
    // The first stop is the link to the content; Enter follows it, and the next stop is behind the list of headings.
    assert_eq!(browser.tab(), "a: Skip to the content");
    browser.key("Enter", "\r");
    let stop = browser.tab();
    assert!(!stop.starts_with("a: "), "{stop}");
    // Regions that scroll are stops, and so are the tables behind the charts. Enter opens one.
    let mut stops = vec![stop];
    while stops.len() < 40 && !stops.iter().any(|stop| stop == "summary: Figures") {
        stops.push(browser.tab());
    }
    assert!(stops.iter().any(|stop| stop == "summary: Figures"), "{stops:?}");
    assert!(stops.iter().any(|stop| stop.starts_with("div: ")), "{stops:?}");
    browser.key("Enter", "\r");
    let open = names(&browser.accessible(), "table");
    assert!(open.iter().any(|name| name == "A chart, requests a second"), "{open:?}");
}
