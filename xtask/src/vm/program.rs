//! Programs for the machines, linked statically, so that they run on the few files that are there:
//! `ringfence`, for which this is also the form in which it can be dropped into any domain, and
//! `traffic` and `engines`, which scenarios use.

use std::path::{Path, PathBuf};

use crate::exec::Cmd;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The programs' files.
pub(super) struct Programs {
    /// The program under test.
    pub(super) ringfence: PathBuf,
    /// `vm/traffic`.
    pub(super) traffic: PathBuf,
    /// `vm/engines`.
    pub(super) engines: PathBuf,
}

/// Builds them, `ringfence` unless it is `given`; `target` is cargo's target directory.
pub(super) fn build(root: &Path, target: &Path, given: Option<&Path>) -> anyhow::Result<Programs> {
    let mut flags = std::env::var_os("RUSTFLAGS").unwrap_or_default();
    flags.push(" -C target-feature=+crt-static");
    let own = given.is_none().then_some("ringfence");
    let packages = ["traffic", "engines"].into_iter().chain(own);
    let built = Cmd::cargo()
        .args(["build", "--release", "--target", TARGET])
        .args(packages.flat_map(|package| ["--package", package]))
        .env("RUSTFLAGS", flags.to_string_lossy().trim())
        // It is copied into memory, under emulation.
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .env("CARGO_TARGET_DIR", target)
        .run(root)?;
    anyhow::ensure!(built, "the programs do not build for {TARGET}, statically linked");
    let folder = target.join(TARGET).join("release");
    let ringfence = match given {
        Some(given) => std::path::absolute(given)?,
        None => folder.join("ringfence"),
    };
    // An empty file would do nothing, successfully.
    let magic = std::fs::read(&ringfence).map(|bytes| bytes.starts_with(b"\x7fELF"));
    anyhow::ensure!(matches!(magic, Ok(true)), "{} is no program", ringfence.display());
    Ok(Programs { ringfence, traffic: folder.join("traffic"), engines: folder.join("engines") })
}
