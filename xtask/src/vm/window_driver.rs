//! Module of grant windows (`linux/grant-window`), as a part of a guest's root file system, built against Debian's
//! headers for the kernel that the guests boot. The part is kept until the sources or the kernel change.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::build::Build;
use super::cpio::Archive;
use super::images::Images;
use super::module::{self, NEEDS, WINDOW};
use crate::tools::Toolbox;

/// File name of the archive.
const ARCHIVE: &str = "window-driver.cpio";

/// Builds the archive below `cache`, or finds it there; returns its path.
pub(super) fn archive(
    root: &Path,
    images: &Images,
    cache: &Path,
    toolbox: &Toolbox,
    may_install: bool,
) -> anyhow::Result<PathBuf> {
    let image = std::fs::read(images.path("vmlinuz"))?;
    let release = module::release(&image).context("the kernel's image has no version")?;
    let sources = WINDOW.sources(root)?;
    let (built, stamp) = (cache.join(ARCHIVE), cache.join("window-driver.stamp"));
    let state = sources.iter().fold(release.clone(), |state, (name, text)| state + name + text);
    if built.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
        return Ok(built);
    }
    println!("building {} for Linux {release}", WINDOW.file);
    let build = Build::begin(cache.join("window-driver"), NEEDS, toolbox, may_install)?;
    let headers = module::headers_of(cache, &release, &[], &build.folder().join("tree"))?;
    WINDOW.compile(&build, &headers, &sources)?;
    let mut archive = Archive::new(Vec::new());
    archive.copy(&format!("lib/{}", WINDOW.file), &build.folder().join(WINDOW.file))?;
    std::fs::write(build.folder().join(ARCHIVE), archive.finish()?)?;
    build.keep(ARCHIVE, &built)?;
    std::fs::write(&stamp, state)?;
    Ok(built)
}
