//! Guest module of `linux/lent-pool`, as a part of a machine's root file system, built against Debian's headers for the
//! kernel that the machine boots. The part is kept until the sources or the kernel change.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::apt::Release;
use super::build::{self, Build, BuildTools};
use super::cpio::Archive;
use super::images::Images;
use super::module::{self, Headers, LENT_POOL, NEEDS};
use super::toolchain::Toolchain;

/// File name of the archive.
const ARCHIVE: &str = "lent-pool.cpio";

/// Builds the archive for the kernel of a Debian release, by default this computer's, below `cache`, or finds it there;
/// returns its path.
pub(crate) fn archive(
    suite: Option<Release>,
    root: &Path,
    images: &Images,
    cache: &Path,
    tools: BuildTools<'_>,
) -> anyhow::Result<PathBuf> {
    let image = std::fs::read(images.path("vmlinuz"))?;
    let release = module::release(&image).context("the kernel's image has no version")?;
    let sources = LENT_POOL.sources(root)?;
    let _lock = build::lock(cache, "lent-pool")?;
    let (built, stamp) = (cache.join(ARCHIVE), cache.join("lent-pool.stamp"));
    let state = sources.iter().fold(release.clone(), |state, (name, text)| state + name + text);
    if built.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
        return Ok(built);
    }
    println!("building {} for Linux {release}", LENT_POOL.file);
    let build = Build::begin(cache.join("lent-pool"), NEEDS, tools)?;
    let headers = match suite {
        Some(suite) => Headers::In(Toolchain::of(suite, &release, cache)?),
        None => module::headers_of(cache, &release, &build.folder().join("tree"))?,
    };
    LENT_POOL.compile(&build, &headers, &sources)?;
    let mut archive = Archive::new(Vec::new());
    let file = LENT_POOL.file;
    archive.copy(&format!("lib/{file}"), &build.folder().join(file))?;
    std::fs::write(build.folder().join(ARCHIVE), archive.finish()?)?;
    build.keep(ARCHIVE, &built)?;
    std::fs::write(&stamp, state)?;
    Ok(built)
}
