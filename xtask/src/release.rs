//! `cargo xtask release VERSION`: everything of a release that stays on this computer.
//!
//! 1. The version goes into the workspace's manifest and lock file, and gets a section with its date in the changelog.
//! 2. `cargo semver-checks` compares the crates with the last tag, if there is one.
//! 3. The changes are committed, because packed crates must be. The text of the tag is written to a file.
//! 4. Debian packages, archives and crates are made.
//!
//! The step makes no tag or signature and sends nothing: it prints the commands that do.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use clap::Args;
use taskkit::deb::workspace_version;
use taskkit::exec::Cmd;

/// Heading of the changes that no version has.
const UNRELEASED: &str = "## [Unreleased]\n";

/// Arguments of `cargo xtask release`.
#[derive(Args)]
pub(crate) struct ReleaseArgs {
    /// Version, such as 0.2.0: greater than the workspace's, or equal to it if it has no tag
    #[arg(value_parser = Version::parse)]
    version: Version,
    /// Date of the release (YYYY-MM-DD); by default today, in UTC
    #[arg(long, value_parser = date)]
    date: Option<String>,
    /// Make neither packages nor archives
    #[arg(long)]
    without_artefacts: bool,
}

/// Version of three numbers, ordered by them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Version([u64; 3]);

impl Version {
    fn parse(text: &str) -> Result<Version, String> {
        let is_number = |word: &str| {
            word.bytes().all(|byte| byte.is_ascii_digit())
                && (word == "0" || !word.starts_with('0'))
        };
        let words: Vec<&str> = text.split('.').collect();
        let numbers = words.iter().filter(|word| is_number(word)).map(|word| word.parse().ok());
        let numbers: Option<Vec<u64>> = numbers.collect();
        let numbers = numbers.filter(|numbers| numbers.len() == words.len());
        let version = numbers.and_then(|numbers| numbers.try_into().ok());
        version.map(Version).ok_or_else(|| format!("{text:?} is no version of three numbers"))
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Version([major, minor, patch]) = self;
        write!(f, "{major}.{minor}.{patch}")
    }
}

fn date(text: &str) -> Result<String, String> {
    let form: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    if form == "0000-00-00" { Ok(text.to_owned()) } else { Err("a date is YYYY-MM-DD".to_owned()) }
}

/// Runs `cargo xtask release`.
pub(crate) fn run(args: &ReleaseArgs, root: &Path, target: &Path) -> anyhow::Result<bool> {
    let version = args.version;
    let old = Version::parse(&workspace_version(root)?).map_err(anyhow::Error::msg)?;
    let tag = format!("v{version}");
    let changed = git(root, &["status", "--porcelain"])?;
    ensure!(changed.trim().is_empty(), "commit or remove these changes first:\n{changed}");
    ensure!(version >= old, "{version} is below the workspace's version, {old}");
    let is_tagged = !git(root, &["tag", "--list", &tag])?.trim().is_empty();
    ensure!(!is_tagged, "the tag {tag} exists");
    let date = match &args.date {
        Some(date) => date.clone(),
        None => today(root)?,
    };
    let folder = artefact_folder(target, &tag);
    std::fs::create_dir_all(&folder)?;
    let edit = |name: &str, change: &dyn Fn(&str) -> anyhow::Result<String>| {
        let path = root.join(name);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let text = change(&text).with_context(|| name.to_owned())?;
        std::fs::write(&path, &text).with_context(|| path.display().to_string())?;
        anyhow::Ok(text)
    };
    edit("Cargo.toml", &|text| Ok(with_version(text, old, version)))?;
    let changelog = edit("CHANGELOG.md", &|text| with_section(text, version, &date))?;
    let locked = Cmd::cargo().args(["update", "--workspace", "--offline", "--quiet"]).run(root)?;
    ensure!(locked, "Cargo.lock was not updated");
    if let Some(last) = last_tag(root)? {
        match semver(root, &last)? {
            Some(fits) => {
                ensure!(fits, "the crates changed more since {last} than {version} says");
            }
            None => println!("not compared with {last}: cargo-semver-checks is not installed"),
        }
    }
    let text = folder.join("tag.txt");
    std::fs::write(&text, tag_text(&changelog, version)?)?;
    let subject = format!("release: Ringfence {version}");
    let body = "The version of all crates, and the section of the changelog.";
    git(root, &["commit", "--all", "--quiet", "--message", &subject, "--message", body])?;
    let made = args.without_artefacts || artefacts(root, &folder)?;
    print!("{}", remaining(&tag, &folder, &text));
    Ok(made)
}

/// Makes packages and archives in `folder`. Returns `false` if one could not be made.
fn artefacts(root: &Path, folder: &Path) -> anyhow::Result<bool> {
    let own = std::env::current_exe()?;
    let make = |words: &[&str]| {
        let output = ["--output".into(), folder.as_os_str().to_owned()];
        Cmd::new(own.clone()).args(words.iter().copied()).args(output).run(root)
    };
    Ok(make(&["dist", "--crates"])?)
}

/// Returns the commands that publish the release.
fn remaining(tag: &str, folder: &Path, text: &Path) -> String {
    let sums = folder.join("SHA256SUMS");
    format!(
        "Nothing has left this computer. What is left to do:\n\
         \x20   git tag --annotate {tag} --file '{}'\n\
         \x20   minisign -S -m '{}'\n\
         \x20   git push origin HEAD {tag}\n\
         \x20   cargo publish --workspace    # the crates, in the order of their dependencies\n\
         The other artefacts are in {}.\n",
        text.display(),
        sums.display(),
        folder.display()
    )
}

/// Compares the published crates with those of a tag. Returns `false` if the version is too small for the changes, and `None`
/// without cargo-semver-checks.
pub(crate) fn semver(root: &Path, tag: &str) -> anyhow::Result<Option<bool>> {
    let check = ["semver-checks", "--workspace", "--baseline-rev", tag];
    let is_there = Cmd::cargo().args(["semver-checks", "--version"]).probe();
    if !is_there {
        return Ok(None);
    }
    Cmd::cargo().args(check).run(root).map(Some).context("cargo semver-checks")
}

/// Returns a manifest whose own version, and those of the crates in the workspace, are replaced.
fn with_version(manifest: &str, old: Version, new: Version) -> String {
    let (old, new) = (format!("version = \"{old}\""), format!("version = \"{new}\""));
    let change = |line: &str| {
        let is_own = line == old || line.contains("path = \"crates/");
        if is_own { line.replace(&old, &new) } else { line.to_owned() }
    };
    manifest.lines().map(|line| change(line) + "\n").collect()
}

/// Returns a changelog in which the changes without a version belong to this one.
fn with_section(changelog: &str, version: Version, date: &str) -> anyhow::Result<String> {
    let heading = format!("## [{version}]");
    ensure!(!changelog.contains(&heading), "there is a section {heading} already");
    let (before, after) =
        changelog.split_once(UNRELEASED).context("there is no section of unreleased changes")?;
    let changes = after.split("\n## [").next().unwrap_or_default();
    ensure!(!changes.trim().is_empty(), "there are no unreleased changes");
    let before = before.replace(" Nothing is released yet.", "");
    Ok(format!("{before}{UNRELEASED}\n{heading} - {date}\n{after}"))
}

/// Returns the text of the tag: the changes of the version.
fn tag_text(changelog: &str, version: Version) -> anyhow::Result<String> {
    let heading = format!("## [{version}]");
    let (_, after) = changelog.split_once(&heading).context("the version has no section")?;
    let (_, changes) = after.split_once('\n').context("the section is empty")?;
    let changes = changes.split("\n## [").next().unwrap_or_default();
    // Lines that begin with `#` are comments to git.
    let line = |line: &str| line.trim_start_matches('#').trim_end().to_owned() + "\n";
    let changes: String = changes.trim().lines().map(line).collect();
    Ok(format!("Ringfence {version}\n\n{changes}"))
}

fn git(root: &Path, words: &[&str]) -> anyhow::Result<String> {
    let output = Cmd::new("git").args(words.iter().copied()).output(root)?;
    output.map_err(|message| anyhow::anyhow!("git {}: {message}", words.join(" ")))
}

fn today(root: &Path) -> anyhow::Result<String> {
    let output = Cmd::new("date").args(["--utc", "+%F"]).output(root)?;
    Ok(output.map_err(|message| anyhow::anyhow!("date: {message}"))?.trim().to_owned())
}

/// Returns the last tag of a version; `None` without one.
pub(crate) fn last_tag(root: &Path) -> anyhow::Result<Option<String>> {
    let tags = git(root, &["tag", "--list", "v*", "--sort=-version:refname"])?;
    Ok(tags.lines().next().map(str::to_owned))
}

/// Returns the directory of a version's artefacts.
fn artefact_folder(target: &Path, tag: &str) -> PathBuf {
    target.join("release-artefacts").join(tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = "[workspace.package]\nversion = \"0.1.0\"\n[workspace.dependencies]\n\
        a = { path = \"crates/a\", version = \"0.1.0\" }\nother = { version = \"0.1.0\" }\n";
    const CHANGELOG: &str = "# Changelog\n\nA form. Nothing is released yet.\n\n## [Unreleased]\n\n### Area\n\n- change\n";

    fn version(text: &str) -> Version {
        Version::parse(text).unwrap()
    }

    #[test]
    fn version_has_three_numbers_and_their_order() {
        assert!(version("0.10.0") > version("0.9.9"));
        assert_eq!(version("1.2.3").to_string(), "1.2.3");
        for text in ["1.2", "1.2.3.4", "1.2.x", "01.2.3", "1..2", "-1.2.3", "1.2.3-rc1", ""] {
            assert!(Version::parse(text).is_err(), "{text}");
        }
        assert!(date("2026-11-28").is_ok() && date("28.11.2026").is_err());
    }

    #[test]
    fn version_is_that_of_the_workspace_and_its_crates_alone() {
        let found = with_version(MANIFEST, version("0.1.0"), version("0.2.0"));
        let wanted = MANIFEST
            .replacen("version = \"0.1.0\"", "version = \"0.2.0\"", 1)
            .replace("crates/a\", version = \"0.1.0\"", "crates/a\", version = \"0.2.0\"");
        assert_eq!(found, wanted);
    }

    #[test]
    fn unreleased_changes_become_the_section_and_the_text_of_the_tag() {
        let found = with_section(CHANGELOG, version("0.1.0"), "2026-11-28").unwrap();
        assert!(
            found.contains("## [Unreleased]\n\n## [0.1.0] - 2026-11-28\n\n### Area\n\n- change\n")
        );
        assert!(!found.contains("Nothing is released"), "{found}");
        let text = tag_text(&found, version("0.1.0")).unwrap();
        assert_eq!(text, "Ringfence 0.1.0\n\n Area\n\n- change\n");
        // Without changes since, there is nothing to release.
        let again = with_section(&found, version("0.2.0"), "2026-11-29").unwrap_err();
        assert!(again.to_string().contains("no unreleased changes"), "{again}");
        assert!(with_section(&found, version("0.1.0"), "2026-11-29").is_err());
    }

    #[test]
    fn release_commits_version_and_changelog_and_prints_what_leaves_the_computer() {
        let place = tempfile::tempdir().unwrap();
        let (root, target) = (place.path().join("tree"), place.path().join("target"));
        std::fs::create_dir_all(root.join("crates/a/src")).unwrap();
        let workspace = "[workspace]\nresolver = \"3\"\nmembers = [\"crates/*\"]\n\n\
            [workspace.package]\nversion = \"0.1.0\"\nedition = \"2024\"\n";
        let member =
            "[package]\nname = \"a\"\nversion.workspace = true\nedition.workspace = true\n";
        for (name, text) in [
            ("Cargo.toml", workspace),
            ("crates/a/Cargo.toml", member),
            ("crates/a/src/lib.rs", ""),
            ("CHANGELOG.md", CHANGELOG),
        ] {
            std::fs::write(root.join(name), text).unwrap();
        }
        let here = |words: &[&str]| git(&root, words).unwrap();
        here(&["init", "--quiet"]);
        here(&["config", "user.name", "test"]);
        here(&["config", "user.email", "test@ringfence.invalid"]);
        assert!(
            Cmd::cargo().args(["generate-lockfile", "--offline", "--quiet"]).run(&root).unwrap()
        );
        here(&["add", "--all"]);
        here(&["commit", "--quiet", "--message", "first"]);
        let release = |text: &str| {
            let date = Some("2026-11-28".to_owned());
            let args = ReleaseArgs { version: version(text), date, without_artefacts: true };
            run(&args, &root, &target)
        };
        assert!(
            release("0.0.9").unwrap_err().to_string().contains("below the workspace's version")
        );
        std::fs::write(root.join("new"), "").unwrap();
        assert!(release("0.2.0").unwrap_err().to_string().contains("?? new"));
        std::fs::remove_file(root.join("new")).unwrap();
        assert!(release("0.2.0").unwrap());
        assert_eq!(workspace_version(&root).unwrap(), "0.2.0");
        assert_eq!(here(&["status", "--porcelain"]), "");
        assert_eq!(here(&["log", "-1", "--format=%s"]).trim(), "release: Ringfence 0.2.0");
        let lock = std::fs::read_to_string(root.join("Cargo.lock")).unwrap();
        assert!(lock.contains("version = \"0.2.0\""), "{lock}");
        let folder = artefact_folder(&target, "v0.2.0");
        let text = std::fs::read_to_string(folder.join("tag.txt")).unwrap();
        assert!(text.starts_with("Ringfence 0.2.0\n"), "{text}");
        let commands = remaining("v0.2.0", &folder, &folder.join("tag.txt"));
        for command in ["git tag --annotate v0.2.0", "minisign -S", "git push", "cargo publish"] {
            assert!(commands.contains(command), "{commands}");
        }
        here(&["tag", "v0.2.0"]);
        assert!(release("0.2.0").unwrap_err().to_string().contains("the tag v0.2.0 exists"));
        assert_eq!(last_tag(&root).unwrap().as_deref(), Some("v0.2.0"));
    }
}
