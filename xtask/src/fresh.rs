//! Step `fresh`: both commands of the README in a new Debian system, as an ordinary user and then as root. `xtask/fresh.sh` runs
//! them. The user is first, because root installs the packages that the tests want.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use taskkit::exec::Cmd;
use taskkit::text::duration;

use crate::clone::clone;
use crate::context::{Context, Ended};
use crate::new_system::{self, BOOKWORM, Extent, System, TRIXIE, remove};
use crate::report::Outcome;

/// Part of the long set, and its system.
const SYSTEMS: [(&str, &System); 2] = [("debian-12", &BOOKWORM), ("debian-13", &TRIXIE)];

/// Packages beside those of every Debian system, which has iproute2: what rustup's page and the README take for granted.
const PACKAGES: [&str; 5] = ["ca-certificates", "curl", "gcc", "git", "libc6-dev"];

pub(crate) fn parts(_: &Context) -> anyhow::Result<Vec<String>> {
    Ok(SYSTEMS.map(|(part, _)| part.to_owned()).into())
}

/// Directories of a run.
struct RunDirectories {
    /// Root directory of the new system.
    system: PathBuf,
    /// Clone of the repository.
    source: PathBuf,
    results: PathBuf,
}

impl RunDirectories {
    fn below(folder: &Path) -> RunDirectories {
        RunDirectories {
            system: folder.join("system"),
            source: folder.join("source"),
            results: folder.join("results"),
        }
    }
}

/// Runs the commands in a system of a release, and prints their durations and what they skipped.
pub(crate) fn run(context: &Context, part: &str) -> anyhow::Result<Ended> {
    if !context.toolbox.is_root {
        return Ok(Outcome::Skipped("only root can install a Debian system".to_owned()).into());
    }
    let known = SYSTEMS.iter().find(|(name, _)| *name == part);
    let (_, system) = known.with_context(|| format!("no system is called {part}"))?;
    let folder = context.target.join("fresh").join(part);
    let pristine = debootstrap(context, system, &folder)?;
    let directories = RunDirectories::below(&folder);
    let RunDirectories { system, source, results } = &directories;
    for directory in [system, source, results] {
        remove(directory)?;
    }
    std::fs::create_dir_all(results)?;
    clone(&context.root, source)?;
    let copy = Cmd::new("cp").args(["-a"]).args([&pristine, system]);
    anyhow::ensure!(copy.run(&folder)?, "{} cannot be copied", pristine.display());
    let mut commands = vec![];
    for who in ["user", "root"] {
        run_as(context, who, &directories)?;
        commands.extend(report(who, results)?);
    }
    remove(system)?;
    remove(source)?;
    Ok(outcome(&commands).into())
}

/// Makes a system of a release below `folder`, unless it is there. Returns its directory.
fn debootstrap(context: &Context, release: &System, folder: &Path) -> anyhow::Result<PathBuf> {
    let (system, complete) = (folder.join("pristine"), folder.join("pristine.complete"));
    if complete.exists() {
        return Ok(system);
    }
    new_system::install(&system, release, Extent::Standard, &PACKAGES, &context.toolbox)?;
    std::fs::write(&complete, "")?;
    Ok(system)
}

/// Runs `xtask/fresh.sh` in namespaces of its own.
fn run_as(context: &Context, who: &str, directories: &RunDirectories) -> anyhow::Result<()> {
    let toolchain = Cmd::new("rustc").args(["--print", "sysroot"]).output(&context.root)?;
    let toolchain = toolchain.map_err(|error| anyhow::anyhow!("rustc: {error}"))?;
    let manifest: toml::Table =
        std::fs::read_to_string(context.root.join("Cargo.toml"))?.parse()?;
    let package = manifest.get("workspace").and_then(|workspace| workspace.get("package"));
    let needed = package.and_then(|package| package.get("rust-version")?.as_str());
    let needed = needed.context("Cargo.toml has no rust-version")?;
    let script = Cmd::new("unshare")
        .args(["--mount", "--pid", "--fork", "--kill-child", "sh"])
        .args([context.root.join("xtask/fresh.sh").as_os_str()])
        .args([&directories.system, &directories.source, &directories.results])
        .args([who, needed, toolchain.trim()]);
    anyhow::ensure!(script.run(&context.root)?, "the system cannot be entered as {who}");
    Ok(())
}

/// Command of the README that ended.
#[derive(Debug, PartialEq)]
struct Command {
    who: String,
    name: String,
    status: i32,
    time: Duration,
}

/// Reads the results of a user. Prints the notes and, of the second command, the report with what was skipped.
fn report(who: &str, results: &Path) -> anyhow::Result<Vec<Command>> {
    let text = std::fs::read_to_string(results.join(format!("{who}.results")))?;
    let commands = read(who, &text, &mut |note| println!("{who}: {note}"))?;
    for command in &commands {
        let Command { name, status, time, .. } = command;
        let log = results.join(format!("{who}-{name}.log"));
        println!("{who}: {name} command: status {status}, {} ({})", duration(*time), log.display());
        let text = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
        // The report of `cargo xtask test` names what was skipped, and why.
        let end = text.split_once("==== report").map_or("", |(_, report)| report);
        print!("{}", if *status != 0 && end.is_empty() { tail(&text) } else { end.to_owned() });
    }
    Ok(commands)
}

fn read(who: &str, text: &str, note: &mut dyn FnMut(&str)) -> anyhow::Result<Vec<Command>> {
    let mut commands = vec![];
    for line in text.lines() {
        if let Some(said) = line.strip_prefix("note ") {
            note(said);
            continue;
        }
        let words: Vec<&str> = line.split(' ').collect();
        let [name, status, seconds] = words[..] else { anyhow::bail!("no result: {line}") };
        let time = Duration::from_secs(seconds.parse()?);
        let (who, name) = (who.to_owned(), name.to_owned());
        commands.push(Command { who, name, status: status.parse()?, time });
    }
    Ok(commands)
}

/// Returns the last lines of a log.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(40)..];
    last.iter().fold(String::new(), |mut text, line| {
        let _ = writeln!(text, "    {line}");
        text
    })
}

/// Returns the outcome of all commands: four of them must have ended, each with status 0.
fn outcome(commands: &[Command]) -> Outcome {
    let text: Vec<String> = commands
        .iter()
        .map(|Command { who, name, status, time }| {
            let failed = if *status == 0 { String::new() } else { format!(" FAILED ({status})") };
            format!("{who}: {name} command {}{failed}", duration(*time))
        })
        .collect();
    let is_good = commands.len() == 4 && commands.iter().all(|command| command.status == 0);
    if is_good { Outcome::Passed(text.join("; ")) } else { Outcome::Failed(text.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_commands_and_notes() {
        let mut notes = vec![];
        let text = "note rustc 1.95\nfirst 0 305\nsecond 1 2400\n";
        let commands = read("user", text, &mut |note| notes.push(note.to_owned())).unwrap();
        assert_eq!(notes, ["rustc 1.95"]);
        assert_eq!(commands[1].time, Duration::from_secs(2400));
        let failed = outcome(&commands);
        let Outcome::Failed(text) = &failed else { panic!("{failed:?}") };
        assert!(text.ends_with("user: second command 40 min 00 s FAILED (1)"), "{text}");
        assert!(read("user", "first 0\n", &mut |_| ()).is_err());
    }

    #[test]
    fn commands_that_did_not_run_are_a_failure() {
        let first = |who: &str| Command {
            who: who.to_owned(),
            name: "first".to_owned(),
            status: 0,
            time: Duration::from_secs(1),
        };
        assert!(matches!(outcome(&[first("user"), first("root")]), Outcome::Failed(_)));
        let four = [first("user"), first("user"), first("root"), first("root")];
        assert!(matches!(outcome(&four), Outcome::Passed(_)));
    }
}
