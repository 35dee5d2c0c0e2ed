//! Programs for the machines, linked statically, so that they run on the few files that are there:
//! `ringfence`, for which this is also the form in which it can be dropped into any domain, and
//! `ringfence-bench`, `traffic` and `engines`, which scenarios use.
//!
//! Integration tests are those of the step `local`, linked as usual: they run in machines that have the files
//! of this computer.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::exec::Cmd;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The programs' files.
pub(super) struct Programs {
    /// The program under test.
    pub(super) ringfence: PathBuf,
    /// `tools/bench`: benchmarks and the roles of tests.
    pub(super) bench: PathBuf,
    /// `vm/traffic`.
    pub(super) traffic: PathBuf,
    /// `tools/iommu-lab`.
    pub(super) engines: PathBuf,
    /// Integration tests, by name.
    pub(super) tests: Vec<(String, PathBuf)>,
    /// Root file system part with the module of `linux/netfront`, if a scenario wants it.
    pub(super) guest_driver: Option<PathBuf>,
}

/// Builds them, `ringfence` unless it is `given`, and the `tests` of these names; `target` is cargo's target
/// directory.
pub(super) fn build(
    root: &Path,
    target: &Path,
    given: Option<&Path>,
    tests: &BTreeSet<&str>,
) -> anyhow::Result<Programs> {
    let mut flags = std::env::var_os("RUSTFLAGS").unwrap_or_default();
    flags.push(" -C target-feature=+crt-static");
    // The product by itself: in one build with the tools it would have their features.
    let own = given.is_none().then_some(["ringfence"].as_slice());
    for packages in [["traffic", "iommu-lab", "ringfence-bench"].as_slice()].into_iter().chain(own)
    {
        let built = Cmd::cargo()
            .args(["build", "--release", "--target", TARGET])
            .args(packages.iter().flat_map(|package| ["--package", package]))
            .env("RUSTFLAGS", flags.to_string_lossy().trim())
            // It is copied into memory, under emulation.
            .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
            .env("CARGO_TARGET_DIR", target)
            .run(root)?;
        anyhow::ensure!(built, "the programs do not build for {TARGET}, statically linked");
    }
    let folder = target.join(TARGET).join("release");
    let ringfence = match given {
        Some(given) => std::path::absolute(given)?,
        None => folder.join("ringfence"),
    };
    // An empty file would do nothing, successfully.
    let magic = std::fs::read(&ringfence).map(|bytes| bytes.starts_with(b"\x7fELF"));
    anyhow::ensure!(matches!(magic, Ok(true)), "{} is no program", ringfence.display());
    Ok(Programs {
        ringfence,
        bench: folder.join("ringfence-bench"),
        traffic: folder.join("traffic"),
        engines: folder.join("engines"),
        tests: build_tests(root, target, tests)?,
        guest_driver: None,
    })
}

/// Integration tests of `ringfence`, built as the step `local` does.
fn build_tests(
    root: &Path,
    target: &Path,
    tests: &BTreeSet<&str>,
) -> anyhow::Result<Vec<(String, PathBuf)>> {
    if tests.is_empty() {
        return Ok(vec![]);
    }
    // As that step has it, so that there is nothing left to build.
    let mut words = vec!["test", "--release", "--no-run"];
    words.extend(["--package", "ringfence", "--package", "ringfence-block"]);
    words.extend(["--package", "ringfence-nbd"]);
    words.extend(tests.iter().flat_map(|name| ["--test", name]));
    let mut build = Cmd::cargo().args(words).env("CARGO_TARGET_DIR", target);
    anyhow::ensure!(build.run(root)?, "the integration tests do not build");
    build = build.args(["--message-format", "json"]);
    let said = build.output(root)?.map_err(|said| anyhow::anyhow!("cargo test: {said}"))?;
    tests.iter().map(|name| Ok(((*name).to_owned(), executable(&said, name)?))).collect()
}

/// The file of a test, out of what cargo says of all that it has built, an object a line.
fn executable(said: &str, name: &str) -> anyhow::Result<PathBuf> {
    let file = said.lines().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let target = message.get("target")?;
        let is_it = target.get("name")?.as_str()? == name
            && target.get("kind")?.as_array()?.iter().any(|kind| kind == "test");
        is_it.then(|| message.get("executable")?.as_str().map(PathBuf::from)).flatten()
    });
    file.with_context(|| format!("cargo built no test {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_test_is_not_that_of_a_program_of_its_name() {
        let said = r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"one"},"executable":null}
{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"one"},"executable":"/t/one"}
{"reason":"compiler-artifact","target":{"kind":["test"],"name":"one"},"executable":"/t/deps/one-5"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(executable(said, "one").unwrap(), Path::new("/t/deps/one-5"));
        assert!(executable(said, "two").is_err());
    }
}
