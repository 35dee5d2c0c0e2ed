//! Guest network driver of `linux/netfront`, as a part of a guest's root file system: the module, built against
//! Debian's headers for the kernel that the guests boot, ethtool, and the hostile backend of the driver's tests. The
//! part is kept until the sources or the kernel change.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::apt::{Apt, Release};
use super::build::{self, Build, BuildTools};
use super::cpio::Archive;
use super::images::Images;
use super::kernel::in_root;
use super::module::{self, Headers, NEEDS, NETFRONT};
use super::toolchain::Toolchain;

/// File name of the archive.
const ARCHIVE: &str = "guest-driver.cpio";
/// Source of the hostile backend, in the repository.
const HOSTILE: &str = "linux/netfront/tests/hostile-backend.c";
/// Packages of ethtool. The part `tools` has the rest of the C library.
const ETHTOOL: [&str; 3] = ["ethtool", "libmnl0", "libc6"];
const LIBRARIES: [&str; 2] = ["lib/x86_64-linux-gnu/libmnl.so.0", "lib/x86_64-linux-gnu/libm.so.6"];

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
    let sources = NETFRONT.sources(root)?;
    let hostile = root.join(HOSTILE);
    let _lock = build::lock(cache, "guest-driver")?;
    let (built, stamp) = (cache.join(ARCHIVE), cache.join("guest-driver.stamp"));
    let state = release.clone() + &std::fs::read_to_string(&hostile)?;
    let state = sources.iter().fold(state, |state, (name, text)| state + name + text);
    if built.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
        return Ok(built);
    }
    println!("building {} for Linux {release}", NETFRONT.file);
    let build = Build::begin(cache.join("guest-driver"), NEEDS, tools)?;
    let tree = build.folder().join("tree");
    let mut apt = Apt::of(suite, cache)?;
    apt.with_lists(|apt| unpack_ethtool(apt, &tree))?;
    let headers = match suite {
        Some(suite) => Headers::In(Toolchain::of(suite, &release, cache)?),
        None => module::headers_of(cache, &release, &tree)?,
    };
    NETFRONT.compile(&build, &headers, &sources)?;
    let hostile = hostile.display().to_string();
    build.run(&["gcc", "-O2", "-Wall", "-static", "-o", "hostile-backend", &hostile])?;
    let mut archive = Archive::new(Vec::new());
    archive.copy(&format!("lib/{}", NETFRONT.file), &build.folder().join(NETFRONT.file))?;
    archive.copy("usr/sbin/ethtool", &in_root(&tree, "sbin/ethtool"))?;
    for library in LIBRARIES {
        archive.copy(library, &in_root(&tree, library))?;
    }
    archive.copy("usr/bin/hostile-backend", &build.folder().join("hostile-backend"))?;
    std::fs::write(build.folder().join(ARCHIVE), archive.finish()?)?;
    build.keep(ARCHIVE, &built)?;
    std::fs::write(&stamp, state)?;
    Ok(built)
}

fn unpack_ethtool(apt: &Apt, tree: &Path) -> anyhow::Result<()> {
    let packages = apt.resolve(&ETHTOOL.map(str::to_owned))?;
    apt.download(&packages)?;
    packages.iter().try_for_each(|package| apt.unpack(package, tree))
}
