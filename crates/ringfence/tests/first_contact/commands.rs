//! Every subcommand of `ringfence` has an end-to-end test; and those tests that have no other place.

use std::path::Path;

use crate::blocks;
use crate::support::{Lab, MOMENT};
use clap::CommandFactory;
use ringfence_testkit::subcommands;

#[test]
fn every_subcommand_has_an_end_to_end_test() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut texts = subcommands::sources(&own.join("tests"), None).unwrap();
    // Pages whose blocks the module `pages` runs.
    for page in ["README.md", "docs/run.md", "docs/uplink.md", "docs/pasta.md", "docs/egress.md"] {
        let page = std::fs::read_to_string(own.join("../..").join(page)).unwrap();
        let scripts = blocks::scripts(&blocks::parse(&page).unwrap());
        texts.extend(scripts.into_iter().map(|script| script.text));
    }
    let missing = subcommands::untested("ringfence", &ringfence::cli::Cli::command(), &texts);
    assert!(missing.is_empty(), "no end-to-end test starts these subcommands: {missing:?}");
}

#[test]
fn man_prints_a_page_and_installs_all() {
    let lab = Lab::new();
    let ringfence = lab.program();
    let page = lab.spawn(&[ringfence, "man", "wait"]).succeed(MOMENT);
    assert!(page.contains(".TH") && page.contains("ringfence-wait"), "{page}");
    let directory = lab.file("man").to_str().unwrap().to_owned();
    lab.spawn(&[ringfence, "man", "--install", &directory]).succeed(MOMENT);
    for page in ["ringfence.1", "ringfence-run.1", "ringfence-wait.1", "ringfence-policy-check.1"] {
        assert!(lab.file("man").join("man1").join(page).is_file(), "{page}");
    }
    let unknown = lab.spawn(&[ringfence, "man", "nosuch"]).finish(MOMENT);
    assert_eq!(unknown.status, Some(2), "{}", unknown.stderr);
}

#[test]
fn completions_name_every_subcommand() {
    let lab = Lab::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = lab.spawn(&[lab.program(), "completions", shell]).succeed(MOMENT);
        for name in ["run", "wait", "policy"] {
            assert!(script.contains(name), "{shell}: {name}");
        }
        assert!(!script.contains("demo-peer"), "{shell}: roles of own processes are hidden");
    }
}

#[test]
fn policy_preset_is_one_that_policy_check_accepts() {
    let lab = Lab::new();
    let preset = lab.spawn(&[lab.program(), "policy", "preset", "pypi"]).succeed(MOMENT);
    std::fs::write(lab.file("pypi.toml"), preset).unwrap();
    lab.spawn(&[lab.program(), "policy", "check", "pypi.toml"]).succeed(MOMENT);
}

#[test]
fn imported_settings_are_a_policy_that_policy_check_accepts() {
    let lab = Lab::new();
    let settings =
        r#"{"network": {"allowedDomains": ["a.org:443"], "deniedDomains": ["b.a.org"]}}"#;
    std::fs::write(lab.file("settings.json"), settings).unwrap();
    let cilium = "kind: CiliumNetworkPolicy\nspec:\n  egress:\n  - toFQDNs:\n    - matchPattern: '*.a.org'\n    \
                  toPorts:\n    - ports:\n      - {port: '443', protocol: TCP}\n";
    std::fs::write(lab.file("cilium.yaml"), cilium).unwrap();
    for (file, words, denied) in [
        ("settings.json", &["--from", "srt"][..], "b.a.org:443"),
        ("settings.json", &[], "a.org:80"),
        ("cilium.yaml", &[], "a.org:443"),
    ] {
        let import = [&[lab.program(), "policy", "import", file], words].concat();
        let policy = lab.spawn(&import).succeed(MOMENT);
        assert!(policy.starts_with(&format!("# Imported from {file}.")), "{policy}");
        std::fs::write(lab.file("imported.toml"), policy).unwrap();
        lab.spawn(&[lab.program(), "policy", "check", "imported.toml"]).succeed(MOMENT);
        let allowed = if file == "cilium.yaml" { "x.a.org:443" } else { "a.org:443" };
        for (destination, status) in [(allowed, Some(0)), (denied, Some(1))] {
            let explain = [lab.program(), "policy", "explain", "imported.toml", destination];
            let explained = lab.spawn(&explain).finish(MOMENT);
            assert_eq!(explained.status, status, "{destination}: {}", explained.stdout);
        }
    }
    let wrong = [lab.program(), "policy", "import", "settings.json", "--from", "cilium"];
    let refused = lab.spawn(&wrong).finish(MOMENT);
    assert!(
        refused.status != Some(0) && refused.stderr.contains("--from srt"),
        "{}",
        refused.stderr
    );
}
