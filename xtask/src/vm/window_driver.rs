//! Module of grant windows (`linux/grant-window`), as a part of a guest's root file system, built against Debian's
//! headers for the kernel that the guests boot. The part is kept until the sources or the kernel change.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::build::Build;
use super::cpio::Archive;
use super::guest_driver::{self, NEEDS};
use super::images::Images;
use crate::tools::Toolbox;

/// Folders of the sources in the repository: the module, and the hypervisor's interface.
const SOURCES: [&str; 2] = ["linux/grant-window", "xen/include/public"];
/// File name of the module.
const MODULE: &str = "ringfence-window.ko";
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
    let release = guest_driver::release(&image).context("the kernel's image has no version")?;
    let mut sources = vec![];
    for folder in SOURCES {
        sources.extend(guest_driver::module_sources(&root.join(folder))?);
    }
    let (built, stamp) = (cache.join(ARCHIVE), cache.join("window-driver.stamp"));
    let state = sources.iter().fold(release.clone(), |state, (name, text)| state + name + text);
    if built.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
        return Ok(built);
    }
    println!("building {MODULE} for Linux {release}");
    let build = Build::begin(cache.join("window-driver"), NEEDS, toolbox, may_install)?;
    let tree = build.folder().join("tree");
    let headers = guest_driver::unpack_headers(cache, &release, &tree)?;
    for (name, text) in &sources {
        std::fs::write(build.folder().join(name), text)?;
    }
    let folder = format!("M={}", build.folder().display());
    let headers = headers.display().to_string();
    build.run(&["make", "-C", &headers, &folder, "modules"])?;
    build.run(&["strip", "--strip-debug", MODULE])?;
    let mut archive = Archive::new(Vec::new());
    archive.copy(&format!("lib/{MODULE}"), &build.folder().join(MODULE))?;
    std::fs::write(build.folder().join(ARCHIVE), archive.finish()?)?;
    build.keep(ARCHIVE, &built)?;
    std::fs::write(&stamp, state)?;
    Ok(built)
}
