//! Debian systems that debootstrap installs below the target directory.

use std::path::Path;

use anyhow::Context as _;
use taskkit::exec::Cmd;
use taskkit::tools::Toolbox;

/// Extent of a new system.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Packages with priority `required`, and apt.
    Minimal,
    /// Packages with priority `required` and `important`.
    Standard,
}

/// Installs a release of Debian with these packages in a new directory, in place of what is there.
pub(crate) fn install(
    root: &Path,
    release: &str,
    extent: Extent,
    packages: &[&str],
    toolbox: &Toolbox,
) -> anyhow::Result<()> {
    remove(root)?;
    std::fs::create_dir_all(root)?;
    // It mounts /proc in the system. After an interruption that mount must not be in the way of the next attempt.
    let installed = Cmd::new("unshare")
        .args(["--mount", "debootstrap", &format!("--include={}", packages.join(","))])
        .args((extent == Extent::Minimal).then_some("--variant=minbase"))
        .args([release.as_ref(), root.as_os_str()])
        .env("PATH", toolbox.path())
        .run(root.parent().unwrap_or(root))?;
    anyhow::ensure!(installed, "debootstrap failed: {}/debootstrap has its log", root.display());
    Ok(())
}

/// Removes a directory with all that is in it, if it exists.
pub(crate) fn remove(folder: &Path) -> anyhow::Result<()> {
    if folder.exists() {
        std::fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    Ok(())
}
