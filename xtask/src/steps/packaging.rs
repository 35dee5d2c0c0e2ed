//! Step `package`: Debian packages, crates and archives.

use std::collections::BTreeSet;

use taskkit::exec::Cmd;
use taskkit::text::count;

use crate::clone::clone;
use crate::context::{Context, Ended, outcome_of};
use crate::packages::published;
use crate::release;
use crate::report::Outcome;

/// Returns the parts: Debian packages, crates and archives.
pub(super) fn parts(_: &Context) -> anyhow::Result<Vec<String>> {
    Ok(["debian", "crates", "install", "minimal-versions", "semver", "dist", "equal"]
        .map(str::to_owned)
        .to_vec())
}

/// Runs one part of the step.
pub(super) fn run(context: &Context, part: &str) -> anyhow::Result<Ended> {
    match part {
        "crates" => crates(context),
        "install" => super::cargo_install::run(context),
        "minimal-versions" => minimal_versions(context),
        "semver" => semver(context),
        "equal" => equal(context),
        "dist" => {
            // Only root can install them.
            let words: &[&str] =
                if context.toolbox.is_root { &["dist", "--try"] } else { &["dist"] };
            let success = context.own_command(words)?.run(&context.root)?;
            Ok(outcome_of(success, "an archive could not be made, or failed its trial"))
        }
        _ => debian(context),
    }
}

/// Packs the published crates, and builds each from its package.
fn crates(context: &Context) -> anyhow::Result<Ended> {
    let mut command = Cmd::cargo().args(["package", "--locked", "--allow-dirty"]);
    for name in published(&context.root)? {
        command = command.args(["--package", &name]);
    }
    let success = command.env("CARGO_TARGET_DIR", &context.target).run(&context.root)?;
    Ok(outcome_of(success, "a crate does not build from its package"))
}

/// Checks the published crates with the oldest versions of their dependencies that the manifests allow. A copy of the
/// committed tree gets the lock file.
fn minimal_versions(context: &Context) -> anyhow::Result<Ended> {
    let folder = context.target.join("minimal-versions");
    let tree = folder.join("tree");
    if tree.exists() {
        std::fs::remove_dir_all(&tree)?;
    }
    std::fs::create_dir_all(&tree)?;
    let archive = folder.join("tree.tar");
    let packed = Cmd::new("git")
        .args(["archive".as_ref(), "--output".as_ref(), archive.as_os_str(), "HEAD".as_ref()])
        .run(&context.root)?;
    let unpacked = packed
        && Cmd::new("tar")
            .args(["--extract".as_ref(), "--file".as_ref(), archive.as_os_str()])
            .run(&tree)?;
    // The option is unstable; it resolves versions and compiles nothing.
    let resolved = unpacked
        && Cmd::cargo()
            .args(["update", "-Z", "direct-minimal-versions"])
            .env("RUSTC_BOOTSTRAP", "1")
            .run(&tree)?;
    if !resolved {
        return Ok(outcome_of(false, "the oldest versions could not be resolved"));
    }
    let mut command = Cmd::cargo().args(["check", "--locked"]);
    for name in published(&context.root)? {
        command = command.args(["--package", &name]);
    }
    let success = command.env("CARGO_TARGET_DIR", folder.join("target")).run(&tree)?;
    Ok(outcome_of(success, "a manifest allows a version with which its crate does not build"))
}

/// Compares the published crates with those of the last tag.
fn semver(context: &Context) -> anyhow::Result<Ended> {
    let Some(tag) = release::last_tag(&context.root)? else {
        let why = "no version has a tag (v1.2.3), so there are no crates to compare with";
        return Ok(Outcome::Skipped(why.to_owned()).into());
    };
    let Some(success) = release::semver(&context.root, &tag)? else {
        let why = "cargo-semver-checks is missing (cargo install --locked cargo-semver-checks)";
        return Ok(Outcome::Skipped(why.to_owned()).into());
    };
    Ok(outcome_of(success, &format!("the crates changed more since {tag} than their version says")))
}

fn debian(context: &Context) -> anyhow::Result<Ended> {
    if !context.toolbox.is_root {
        return Ok(Outcome::Skipped("only root can install packages".to_owned()).into());
    }
    let success = context.own_command(&["package", "--try"])?.run(&context.root)?;
    Ok(outcome_of(success, "a package failed its trial"))
}

/// Builds everything in two clones of the last commit, whose paths have different lengths, and compares the checksums.
fn equal(context: &Context) -> anyhow::Result<Ended> {
    let folder = context.target.join("equal");
    let mut sums = Vec::new();
    for name in ["one", "another with a longer name"] {
        let tree = folder.join(name);
        if tree.exists() {
            std::fs::remove_dir_all(&tree)?;
        }
        std::fs::create_dir_all(&folder)?;
        clone(&context.root, &tree)?;
        let made = context
            .own_command(&["dist", "--crates"])?
            .env("CARGO_MANIFEST_DIR", tree.join("xtask"))
            .env_remove("CARGO_TARGET_DIR")
            .run(&tree)?;
        if !made {
            return Ok(outcome_of(false, "an archive could not be made"));
        }
        let dist = tree.join("target/dist");
        sums.push(std::fs::read_to_string(dist.join("SHA256SUMS"))?);
        let kept = folder.join(format!("{name}.dist"));
        if kept.exists() {
            std::fs::remove_dir_all(&kept)?;
        }
        std::fs::rename(dist, kept)?;
        std::fs::remove_dir_all(&tree)?;
    }
    let differing = differing(&sums[0], &sums[1]);
    if differing.is_empty() {
        let note = format!("{} of two builds are equal", count(sums[0].lines().count(), "file"));
        return Ok(Outcome::Passed(note).into());
    }
    let why = format!("{} differ: both are in {}", differing.join(", "), folder.display());
    Ok(outcome_of(false, &why))
}

/// Returns the names in two lists of checksums whose lines are not in both.
fn differing(one: &str, other: &str) -> Vec<String> {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    let differing = &lines(one) ^ &lines(other);
    let names = differing.iter().filter_map(|line| line.split_whitespace().last());
    names.map(str::to_owned).collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    #[test]
    fn differing_checksum_and_missing_file_are_named_once() {
        let (one, other) = ("1  a\n2  b\n", "1  a\n3  b\n4  c\n");
        assert_eq!(differing(one, other), ["b", "c"]);
        assert!(differing(one, one).is_empty());
    }
}
