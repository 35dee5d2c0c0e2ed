//! Commands in pages: every block of shell commands in README.md and `docs/` has a marker, and those that run here run
//! out of the page's own text ("Commands in pages" in docs/testing.md).
//!
//! A script runs as an ordinary user, in network, mount and PID namespaces of its own, with a network that leads to
//! another namespace. Its PATH has `ringfence`, `ringfence-bench`, the programs of every system ([`BASE`]) and those
//! that its marker names.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::blocks::{self, Block, Marker, Place, Script};
use crate::support::needs::{Need, find_program, skip};
use crate::support::users::{USER, copy, copy_program, give};
use crate::support::world::{Families, World};

/// Time limit of a script in seconds.
const LIMIT: u64 = 120;
/// Begins a script: shows each command, and ends at the end what runs in the background.
const PROLOGUE: &str = "trap '{ s=$?; set +ex; } 2>/dev/null; for job in $(jobs -p); do kill $job; done; wait; exit $s' EXIT; set -x";
/// Programs that every system has: those of Debian's essential packages that scripts use.
const BASE: [&str; 19] = [
    "sh", "cat", "chmod", "cp", "echo", "env", "false", "grep", "ls", "mkdir", "mv", "rm", "sleep",
    "test", "timeout", "touch", "true", "truncate", "unshare",
];
/// Programs that markers may name, and their Debian packages.
const PROGRAMS: [(&str, &str); 6] = [
    ("curl", "curl"),
    ("ip", "iproute2"),
    ("nbdinfo", "libnbd-bin"),
    ("python3", "python3"),
    ("qemu-img", "qemu-utils"),
    ("sha256sum", "coreutils"),
];

/// Defines a test for each page with commands that run here.
macro_rules! pages {
    ($($(#[$mark:meta])* $test:ident: $page:literal,)+) => {
        const PAGES: &[&str] = &[$($page),+];
        $(
            #[test]
            $(#[$mark])*
            fn $test() {
                run_page($page);
            }
        )+
    };
}

pages! {
    commands_of_readme_run: "README.md",
    commands_of_disks_run: "docs/disks.md",
    commands_of_egress_run: "docs/egress.md",
    commands_of_names_run: "docs/names.md",
    commands_of_pasta_run: "docs/pasta.md",
    #[ignore = "long: benchmarks"]
    commands_of_perf_howto_run: "docs/perf/howto.md",
    commands_of_run_run: "docs/run.md",
    #[ignore = "long: benchmarks"]
    commands_of_staging_grants_run: "docs/staging-grants.md",
    commands_of_start_run: "docs/start.md",
    commands_of_switch_run: "docs/switch.md",
    commands_of_uplink_run: "docs/uplink.md",
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Returns the blocks of a page.
fn blocks_of(page: &str) -> Vec<Block> {
    let text =
        fs::read_to_string(root().join(page)).unwrap_or_else(|error| panic!("{page}: {error}"));
    blocks::parse(&text).unwrap_or_else(|problems| panic!("{page}: {}", problems.join("\n")))
}

/// Returns README.md and the pages below `docs`, without the records of `docs/lab`.
fn all_pages() -> Vec<String> {
    let (root, mut pages) = (root(), vec!["README.md".to_owned()]);
    let mut directories = vec![root.join("docs")];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("docs/lab") {
                directories.push(path);
            } else if path.extension().is_some_and(|ending| ending == "md") {
                pages.push(path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    pages.sort();
    pages
}

#[test]
fn every_block_has_a_marker_and_every_page_its_test() {
    let mut running = Vec::new();
    for page in all_pages() {
        if !blocks::scripts(&blocks_of(&page)).is_empty() {
            running.push(page);
        }
    }
    assert_eq!(running, PAGES, "the pages with commands that run here, and the list in this file");
}

#[test]
fn commands_for_other_machines_are_those_of_a_scenario() {
    for page in all_pages() {
        for block in blocks_of(&page) {
            let directory = match block.marker {
                Marker::Runs { place: Place::Xen, .. } => "vm/xen",
                Marker::Runs { place: Place::Clients, .. } => "clients",
                _ => continue,
            };
            let scenarios = texts_below(&root().join(directory));
            for command in blocks::commands(&block.text) {
                // At the end of a word of the shell, so that a longer command does not count.
                let is_there = |text: &String| {
                    ["'", "\"", "\n"].iter().any(|end| text.contains(&format!("{command}{end}")))
                };
                assert!(
                    scenarios.iter().any(is_there),
                    "{page}:{}: no file below {directory} runs `{command}`",
                    block.line
                );
            }
        }
    }
}

fn texts_below(directory: &Path) -> Vec<String> {
    let mut texts = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            texts.extend(texts_below(&path));
        } else {
            texts.extend(fs::read_to_string(path));
        }
    }
    texts
}

/// Runs the commands of a page.
fn run_page(page: &str) {
    for script in blocks::scripts(&blocks_of(page)) {
        let place = format!("{page}:{}", script.line);
        let needs = script.needs.iter().map(|name| need(name, &place));
        let bench = Need::Built("ringfence-bench");
        let bench = script.text.contains("ringfence-bench").then_some(bench);
        let user = if script.is_root { Some(Need::Root) } else { None };
        let all = [Need::Guests].into_iter().chain(needs).chain(bench).chain(user);
        match all.filter_map(Need::missing).next() {
            Some(reason) => skip(&format!("{place}: {reason}")),
            None => run_script(page, &script),
        }
    }
}

fn need(program: &str, place: &str) -> Need {
    let known = PROGRAMS.iter().find(|(name, _)| *name == program);
    let (name, package) =
        known.unwrap_or_else(|| panic!("{place}: `{program}` is not in PROGRAMS"));
    Need::Program(name, package)
}

/// Runs a script in a directory of its own. Fails with the line of the page at which it stopped.
fn run_script(page: &str, script: &Script) {
    let programs = programs_for(script);
    let bin = programs.path();
    let Some(world) = World::of(Families::Both, bin.join("ringfence")) else { return };
    let mut words: Vec<String> = vec![];
    if rustix::process::geteuid().is_root() && !script.is_root {
        give(&world.lab, USER);
        let user = ["setpriv", "--clear-groups"].map(str::to_owned);
        words.extend(user);
        words.extend([format!("--reuid={USER}"), format!("--regid={USER}")]);
    }
    fs::create_dir(world.file("page")).unwrap();
    give_directory(&world.file("page"), script);
    // Line 1 of a page is no command.
    fs::write(bin.join("script"), format!("{PROLOGUE}{}", script.text)).unwrap();
    let script_file = bin.join("script").to_str().unwrap().to_owned();
    let directory = world.file("page").to_str().unwrap().to_owned();
    // A strict guest does not see this test's directory, so its programs are the system's.
    let system = if script.text.contains("--strict") { ":/usr/bin:/bin" } else { "" };
    let path = format!("PATH={}{system}", bin.join("bin").display());
    words.extend(["env".to_owned(), path, format!("--chdir={directory}")]);
    words.extend(["timeout", "-k", "5"].map(str::to_owned));
    words.extend([LIMIT.to_string(), "sh".to_owned(), "-e".to_owned(), script_file]);
    let finished = world.host(&words).finish(Duration::from_secs(LIMIT + 20));
    assert_eq!(
        finished.status,
        Some(0),
        "{page}:{}: failed\n{}{}",
        script.last_line(&finished.stderr),
        finished.stdout,
        finished.stderr
    );
}

fn give_directory(path: &Path, script: &Script) {
    if rustix::process::geteuid().is_root() && !script.is_root {
        std::os::unix::fs::chown(path, Some(USER), Some(USER)).unwrap();
    }
}

/// Makes a directory with the programs that the script may use, for every user.
fn programs_for(script: &Script) -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    copy_program(&directory.path().join("ringfence"));
    let bin = directory.path().join("bin");
    fs::create_dir(&bin).unwrap();
    symlink(directory.path().join("ringfence"), bin.join("ringfence")).unwrap();
    if script.text.contains("ringfence-bench") {
        let own = crate::support::needs::beside_product("ringfence-bench");
        copy(&own, &bin.join("ringfence-bench"));
    }
    for program in BASE.into_iter().chain(script.needs.iter().map(String::as_str)) {
        // Other directories may be closed to the ordinary user.
        let system =
            ["/usr/bin", "/bin", "/usr/sbin", "/sbin"].map(|place| Path::new(place).join(program));
        let system = system.into_iter().find(|file| file.is_file());
        let found = system.or_else(|| find_program(program));
        let found = found.unwrap_or_else(|| panic!("{program} is not installed"));
        symlink(found, bin.join(program)).unwrap();
    }
    directory
}
