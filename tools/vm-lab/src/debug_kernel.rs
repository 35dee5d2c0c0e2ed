//! Kernel with KASAN, lockdep and kmemleak, for guests of scenarios with `# kernel: debug`: the version that the other
//! guests boot, from Debian's package of its source, with only the options that guests need. Its part of dom0's root file
//! system has the kernel, and a part for guests with its modules and the module of `linux/netfront`.
//!
//! The build of the kernel takes about ten minutes of two processors and 2 GB. The kernel is kept, with what a module's build
//! needs of its tree, until its version, its options or the variables of make change; the part until the kernel or the
//! module's sources change.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::build::{self, Build, BuildTools};
use super::cpio::Archive;
use super::images::{GUEST_MODULES, Images};
use super::kernel::Modules;
use super::module::{self, Headers, NEEDS, NETFRONT};

/// Enabled options; all others that can be disabled are.
const OPTIONS: &str = include_str!("debug_kernel.config");
/// Variables of make that leave KASAN's checks out of the first code of a PVH guest. It runs on a stack at its physical
/// address, for which there is no shadow memory: the checks would be a triple fault.
/// The last one is for `memcmp`, which that code calls.
const EARLY: [&str; 3] = [
    "KASAN_SANITIZE_enlighten.o=n",
    "KASAN_SANITIZE_enlighten_pvh.o=n",
    "KASAN_SANITIZE_string.o=n",
];
/// Folders of the kernel's tree that a module's build needs.
const KEPT: [&str; 4] = ["arch", "include", "scripts", "tools"];
/// File name of the part.
const ARCHIVE: &str = "debug-kernel.cpio";

/// Makes the part below `cache`, or finds it there; returns its path.
pub(crate) fn archive(
    root: &Path,
    images: &Images,
    cache: &Path,
    tools: BuildTools<'_>,
) -> anyhow::Result<PathBuf> {
    let image = std::fs::read(images.path("vmlinuz"))?;
    let release = module::release(&image).context("the kernel's image has no version")?;
    let sources = NETFRONT.sources(root)?;
    let _lock = build::lock(cache, "debug-kernel")?;
    let kernel = kernel(&release, cache, tools)?;
    let (built, stamp) = (cache.join(ARCHIVE), cache.join("debug-kernel.stamp"));
    let state = kernel_state(&release) + &GUEST_MODULES.concat();
    let state = sources.iter().fold(state, |state, (name, text)| state + name + text);
    if built.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
        return Ok(built);
    }
    println!("building {} for Linux with KASAN, lockdep and kmemleak", NETFRONT.file);
    let build = Build::begin(cache.join("debug-driver"), NEEDS, tools)?;
    let tree = kernel.join("tree");
    let release = std::fs::read_to_string(tree.join("include/config/kernel.release"))?;
    NETFRONT.compile(&build, &Headers::Here(tree), &sources)?;

    let mut guest = Archive::new(Vec::new());
    let modules = Modules::find(&kernel.join("installed"), release.trim())?;
    modules.add(GUEST_MODULES, &mut guest)?;
    guest.copy(&format!("lib/{}", NETFRONT.file), &build.folder().join(NETFRONT.file))?;
    let mut dom0 = Archive::new(Vec::new());
    dom0.copy("boot/vmlinux-debug", &kernel.join("vmlinux"))?;
    dom0.file("boot/debug.cpio", false, &guest.finish()?)?;
    std::fs::write(build.folder().join(ARCHIVE), dom0.finish()?)?;
    build.keep(ARCHIVE, &built)?;
    std::fs::write(&stamp, state)?;
    Ok(built)
}

/// Builds the kernel below `cache`, or finds it there. Returns a folder with `vmlinux`, the modules in `installed`, and
/// `tree` for builds of modules.
fn kernel(release: &str, cache: &Path, tools: BuildTools<'_>) -> anyhow::Result<PathBuf> {
    let folder = cache.join("debug-kernel");
    let (stamp, state) = (folder.join("stamp"), kernel_state(release));
    if std::fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
        return Ok(folder);
    }
    let source = source_package(release).context("the kernel's version has less than two parts")?;
    let build = Build::begin(folder.clone(), build::LINUX_NEEDS, tools)?;
    println!("building Linux with KASAN, lockdep and kmemleak, which takes about ten minutes");
    build.unpack_linux(&source, OPTIONS)?;
    build.make(&[["vmlinux", "modules"].as_slice(), EARLY.as_slice()].concat())?;
    build.make(&["INSTALL_MOD_PATH=../installed", "modules_install"])?;
    build.run(&["strip", "-o", "vmlinux", "tree/vmlinux"])?;
    for entry in std::fs::read_dir(folder.join("tree"))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() && !KEPT.iter().any(|kept| entry.file_name() == **kept) {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    for image in ["vmlinux", "vmlinux.o"] {
        std::fs::remove_file(folder.join("tree").join(image))?;
    }
    std::fs::write(&stamp, state)?;
    Ok(folder)
}

/// Returns all that the kernel is made of, as text.
fn kernel_state(release: &str) -> String {
    [&[release, OPTIONS], EARLY.as_slice()].concat().join("\n")
}

/// Returns the name of Debian's package with the source of a kernel: `linux-source-6.1` for `6.1.0-31-amd64`.
fn source_package(release: &str) -> Option<String> {
    let mut parts = release.split('.');
    let (major, minor) = (parts.next()?, parts.next()?);
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(major) && is_number(minor)).then(|| format!("linux-source-{major}.{minor}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_package_has_first_two_parts_of_version() {
        assert_eq!(source_package("6.1.0-31-amd64").as_deref(), Some("linux-source-6.1"));
        assert_eq!(source_package("6.12.57+deb13-amd64").as_deref(), Some("linux-source-6.12"));
        assert_eq!(source_package("6"), None);
        assert_eq!(source_package("6.x"), None);
    }
}
