//! The program under test: `ringfence`, linked statically, so that it runs on the few files that
//! the machines have. This is also the form in which it can be dropped into any domain.

use std::path::{Path, PathBuf};

use crate::exec::Cmd;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds it; `target` is cargo's target directory.
pub(super) fn build(root: &Path, target: &Path) -> anyhow::Result<PathBuf> {
    let mut flags = std::env::var_os("RUSTFLAGS").unwrap_or_default();
    flags.push(" -C target-feature=+crt-static");
    let built = Cmd::cargo()
        .args(["build", "--release", "--package", "ringfence", "--target", TARGET])
        .env("RUSTFLAGS", flags.to_string_lossy().trim())
        // It is copied into memory, under emulation.
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .env("CARGO_TARGET_DIR", target)
        .run(root)?;
    anyhow::ensure!(built, "ringfence does not build for {TARGET}, statically linked");
    Ok(target.join(TARGET).join("release/ringfence"))
}
