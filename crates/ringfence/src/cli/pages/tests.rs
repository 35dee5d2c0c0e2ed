use std::collections::BTreeSet;

use clap_complete::Shell;

use super::*;

fn page(words: &[&str]) -> anyhow::Result<String> {
    let page = words.iter().map(ToString::to_string).collect();
    let mut out = Vec::new();
    ManArgs { install: None, page }.run(&mut out)?;
    Ok(String::from_utf8(out).unwrap().replace('\\', ""))
}

/// Returns the names of all commands that are not hidden, as `ringfence-policy-check`.
fn names(command: &Command, prefix: &str) -> BTreeSet<String> {
    let name = format!("{prefix}{}", command.get_name());
    let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    let mut all: BTreeSet<_> = shown.flat_map(|sub| names(sub, &format!("{name}-"))).collect();
    all.insert(name);
    all
}

/// Fails for a line of examples or notes that the help would wrap.
fn check_widths(command: &Command, limit: usize) {
    let texts = [command.get_after_help(), command.get_after_long_help()];
    for line in texts
        .into_iter()
        .flatten()
        .flat_map(|text| text.to_string().lines().map(str::to_owned).collect::<Vec<_>>())
    {
        assert!(line.chars().count() <= limit, "{}: {line}", command.get_name());
    }
    command.get_subcommands().for_each(|sub| check_widths(sub, limit));
}

#[test]
fn examples_and_notes_are_no_wider_than_the_help() {
    check_widths(&documented(), 100);
}

#[test]
fn page_of_run_names_its_options_and_its_groups() {
    let page = page(&["run"]).unwrap();
    for text in ["ringfence-run 1", "--switch", "--host-tap", "--mtu", "http://web:8000/"] {
        assert!(page.contains(text), "{text}");
    }
    for group in ["NETWORK", "PORTS", "EGRESS", "DISKS", "ISOLATION", "OUTPUT"] {
        assert!(
            page.lines().any(|line| line.trim_start_matches(".SH ").trim_matches('"') == group),
            "{group}"
        );
    }
    assert!(!page.contains("--backend-offload"));
}

#[test]
fn page_of_each_command_describes_it_in_full() {
    for (command, text) in [
        ("run", "the network frontend, serves its eth0"),
        ("ps", "the driver domain of a shared switch counts for"),
        ("exec", "It ends with the guest."),
        ("logs", "is not among them"),
        ("status", "what it sent, and what it received"),
        ("stop", "SIGKILL if it has not ended in time"),
        ("serve", "Needs root"),
        ("attach", "Needs root"),
        ("hub", "needs no such hub"),
        ("pool-proxy", "Only control messages pass through it"),
        ("shield", "The shield alone maps"),
        ("pasta", "and then runs in the background"),
    ] {
        let page = page(&[command]).unwrap().replace('\n', " ");
        assert!(page.contains(text), "{command}: {page}");
    }
}

#[test]
fn page_of_unknown_or_internal_command_is_an_error_of_usage() {
    for words in [&["moon"][..], &["internal"], &["internal", "driver"], &["policy", "moon"]] {
        let error = page(words).unwrap_err().downcast::<clap::Error>().unwrap();
        assert_eq!(error.exit_code(), 2, "{words:?}");
        assert!(error.to_string().contains(&words.join(" ")), "{error}");
    }
}

#[test]
fn install_writes_one_page_for_each_command() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("share/man");
    let args = ManArgs { install: Some(target.clone()), page: Vec::new() };
    // The second time replaces the pages of the first.
    for _ in 0..2 {
        args.run(&mut io::sink()).unwrap();
    }
    let files = fs::read_dir(target.join("man1")).unwrap();
    let files: BTreeSet<_> =
        files.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let expected = names(&Cli::command(), "").into_iter().map(|name| format!("{name}.1"));
    assert_eq!(files, expected.collect());
    assert!(files.contains("ringfence.1") && files.contains("ringfence-policy-check.1"));
    for name in &files {
        let page = fs::read_to_string(target.join("man1").join(name)).unwrap().replace('\\', "");
        let title = name.trim_end_matches(".1");
        assert!(page.contains(&format!(".TH {title} 1")), "{title}");
        assert!(!page.contains("ringfence-internal"), "{title}");
    }
}

#[test]
fn install_below_a_file_names_the_path() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let args = ManArgs { install: Some(file.path().to_owned()), page: Vec::new() };
    let error = format!("{:#}", args.run(&mut io::sink()).unwrap_err());
    assert!(error.contains(&file.path().display().to_string()), "{error}");
}

#[test]
fn completions_have_the_users_commands_alone() {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
        let mut script = Vec::new();
        write_completions(shell, &mut script);
        let script = String::from_utf8(script).unwrap();
        assert!(script.contains("publish-default"), "{shell}");
        for word in ["internal", "guest-init", "demo-peer", "supervisor"] {
            assert!(!script.contains(word), "{shell}: {word}");
        }
    }
}

#[test]
fn page_in_docs_names_every_option_of_run_that_help_shows() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let pages = fs::read_dir(docs)
        .unwrap()
        .filter_map(|entry| fs::read_to_string(entry.unwrap().path()).ok());
    let text: String = pages.collect();
    let is_end = |c: char| !(c.is_ascii_alphanumeric() || c == '-');
    let words: BTreeSet<_> = text.split(is_end).collect();
    let run = find(&["run".to_owned()]).unwrap();
    let shown = run.get_arguments().filter(|option| !option.is_hide_set());
    for option in shown.filter(|option| option.get_id() != "help") {
        let long = option.get_long().map(|long| format!("--{long}"));
        let names: Vec<_> =
            long.into_iter().chain(option.get_short().map(|c| format!("-{c}"))).collect();
        let is_named = names.is_empty() || names.iter().any(|name| words.contains(name.as_str()));
        assert!(is_named, "{names:?}");
    }
}
