//! Programs for the machines, linked statically, because the machines have few other files: `ringfence`,
//! which runs in this form in any domain, and `ringfence-bench`, `traffic` and `engines`, which scenarios use.
//!
//! Integration tests are those of the step `local`, linked dynamically. They run in machines that have the files of
//! this computer.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use taskkit::exec::{Cmd, TEST_PROFILE};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Sets of programs that a run builds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All programs.
    Full,
    /// `ringfence` and `traffic`, in one build.
    Short,
}

impl Extent {
    /// Returns the packages of each build. The product is built without the tools: with them it would get the features that
    /// they enable.
    fn builds(self) -> &'static [&'static [&'static str]] {
        match self {
            Extent::Full => &[&["traffic", "iommu-lab", "ringfence-bench"], &["ringfence"]],
            Extent::Short => &[&["ringfence", "traffic"]],
        }
    }

    /// Returns the profile of the programs. A short run shows that each kind of machine works: it needs no speed, and the
    /// compiler is most of it.
    fn profile(self) -> &'static str {
        match self {
            Extent::Full => "release",
            Extent::Short => TEST_PROFILE,
        }
    }
}

/// Programs that a run uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProgramSelection<'a> {
    pub(crate) extent: Extent,
    /// File that replaces `ringfence`.
    pub(crate) given: Option<&'a Path>,
}

/// Paths of the programs' files.
pub(crate) struct Programs {
    /// Program under test (`crates/ringfence`).
    pub(crate) ringfence: PathBuf,
    /// Benchmarks and roles of tests (`tools/bench`); `None` in a short run.
    pub(crate) bench: Option<PathBuf>,
    /// Traffic generator (`vm/traffic`).
    pub(crate) traffic: PathBuf,
    /// IOMMU engines (`tools/iommu-lab`); `None` in a short run.
    pub(crate) engines: Option<PathBuf>,
    /// Integration tests by name.
    pub(crate) tests: Vec<(String, PathBuf)>,
    /// Root file system part with the module of `linux/netfront`, if a scenario wants it.
    pub(crate) guest_driver: Option<PathBuf>,
    /// Root file system part with the module of `linux/grant-window`, if a scenario wants it.
    pub(crate) window_driver: Option<PathBuf>,
    /// Root file system part with the agent and the modules of `xen/tests`, if a scenario wants it.
    pub(crate) window_tests: Option<PathBuf>,
    /// Root file system part with the module of `linux/lent-pool`, if a scenario wants it.
    pub(crate) lent_pool: Option<PathBuf>,
    /// Parts of dom0's root file system that scenarios want: other kernels for guests, foreign ends, the kernel's selftests.
    pub(crate) dom0_parts: Vec<Dom0Part>,
}

/// Part of dom0's root file system. Only machines that run one of its scenarios have it: dom0 unpacks it into its memory.
pub(crate) struct Dom0Part {
    pub(crate) file: PathBuf,
    /// Names of the scenarios that want it.
    pub(crate) scenarios: Vec<String>,
}

/// Builds the programs, and the integration tests in `tests`. `target` is cargo's target directory.
pub(crate) fn build(
    root: &Path,
    target: &Path,
    selection: ProgramSelection<'_>,
    tests: &BTreeSet<&str>,
) -> anyhow::Result<Programs> {
    let ProgramSelection { extent, given } = selection;
    let mut flags = std::env::var_os("RUSTFLAGS").unwrap_or_default();
    // The files are copied into memory under emulation, so they should be small. The flags do not apply to macros and build
    // scripts, which are those of other builds; the profile's own option would make others.
    flags.push(" -C target-feature=+crt-static -C strip=symbols");
    let is_wanted = |packages: &&&[&str]| given.is_none() || **packages != ["ringfence"];
    for packages in extent.builds().iter().filter(is_wanted) {
        let built = Cmd::cargo()
            .args(["build", "--profile", extent.profile(), "--target", TARGET])
            .args(packages.iter().flat_map(|package| ["--package", package]))
            .env("RUSTFLAGS", flags.to_string_lossy().trim())
            .env("CARGO_TARGET_DIR", target)
            .run(root)?;
        anyhow::ensure!(built, "the programs do not build for {TARGET}, statically linked");
    }
    let folder = target.join(TARGET).join(extent.profile());
    let tool = |name: &str| (extent == Extent::Full).then(|| folder.join(name));
    let ringfence = match given {
        Some(given) => std::path::absolute(given)?,
        None => folder.join("ringfence"),
    };
    // An empty file would run successfully and do nothing.
    let magic = std::fs::read(&ringfence).map(|bytes| bytes.starts_with(b"\x7fELF"));
    anyhow::ensure!(matches!(magic, Ok(true)), "{} is no program", ringfence.display());
    Ok(Programs {
        ringfence,
        bench: tool("ringfence-bench"),
        traffic: folder.join("traffic"),
        engines: tool("engines"),
        tests: build_tests(root, target, tests)?,
        guest_driver: None,
        window_driver: None,
        lent_pool: None,
        window_tests: None,
        dom0_parts: vec![],
    })
}

/// Builds integration tests of `ringfence` as the step `local` does.
fn build_tests(
    root: &Path,
    target: &Path,
    tests: &BTreeSet<&str>,
) -> anyhow::Result<Vec<(String, PathBuf)>> {
    if tests.is_empty() {
        return Ok(vec![]);
    }
    // The same profile and packages as in that step, so that nothing is built twice.
    let mut words = vec!["test", "--profile", TEST_PROFILE, "--workspace", "--no-run"];
    words.extend(tests.iter().flat_map(|name| ["--test", name]));
    let mut build = Cmd::cargo().args(words).env("CARGO_TARGET_DIR", target);
    anyhow::ensure!(build.run(root)?, "the integration tests do not build");
    build = build.args(["--message-format", "json"]);
    let said = build.output(root)?.map_err(|said| anyhow::anyhow!("cargo test: {said}"))?;
    tests.iter().map(|name| Ok(((*name).to_owned(), executable(&said, name)?))).collect()
}

/// Returns the file of a test from cargo's messages, one JSON object in each line.
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
    fn file_of_test_is_not_that_of_program_with_same_name() {
        let said = r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"one"},"executable":null}
{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"one"},"executable":"/t/one"}
{"reason":"compiler-artifact","target":{"kind":["test"],"name":"one"},"executable":"/t/deps/one-5"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(executable(said, "one").unwrap(), Path::new("/t/deps/one-5"));
        assert!(executable(said, "two").is_err());
    }
}
