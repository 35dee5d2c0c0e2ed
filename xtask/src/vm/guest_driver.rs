//! Guest network driver of `linux/netfront`, as a part of a guest's root file system: the module, built against
//! Debian's headers for the kernel that the guests boot, ethtool, and the hostile backend of the driver's tests. The
//! headers are unpacked, not installed. The part is kept until the sources or the kernel change.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::apt::Apt;
use super::build::Build;
use super::cpio::Archive;
use super::images::Images;
use crate::tools::{self, Tool, Toolbox};

/// Tools of the build. Kbuild's objtool needs libelf.
pub(super) static NEEDS: &[&Tool] = &[&tools::GCC, &tools::MAKE, &tools::LIBELF];

/// Folder of the sources, in the repository.
const SOURCES: &str = "linux/netfront";
/// File name of the module.
const MODULE: &str = "ringfence-netfront.ko";
/// File name of the archive.
const ARCHIVE: &str = "guest-driver.cpio";
/// Source of the hostile backend, in the folder of the sources.
const HOSTILE: &str = "tests/hostile-backend.c";
/// Packages of ethtool. The part `tools` has the rest of the C library.
const ETHTOOL: [&str; 3] = ["ethtool", "libmnl0", "libc6"];
const LIBRARIES: [&str; 2] =
    ["usr/lib/x86_64-linux-gnu/libmnl.so.0", "lib/x86_64-linux-gnu/libm.so.6"];

/// Builds the archive below `cache`, or finds it there; returns its path.
pub(super) fn archive(
    root: &Path,
    images: &Images,
    cache: &Path,
    toolbox: &Toolbox,
    may_install: bool,
) -> anyhow::Result<PathBuf> {
    let image = std::fs::read(images.path("vmlinuz"))?;
    let release = release(&image).context("the kernel's image has no version")?;
    let sources = sources(&root.join(SOURCES))?;
    let (built, stamp) = (cache.join(ARCHIVE), cache.join("guest-driver.stamp"));
    let state = sources.iter().fold(release.clone(), |state, (name, text)| state + name + text);
    if built.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
        return Ok(built);
    }
    println!("building {MODULE} for Linux {release}");
    let build = Build::begin(cache.join("guest-driver"), NEEDS, toolbox, may_install)?;
    let tree = build.folder().join("tree");
    let headers = unpack_headers(cache, &release, &tree)?;
    for (name, text) in &sources {
        std::fs::write(build.folder().join(name), text)?;
    }
    let sources = format!("M={}", build.folder().display());
    let headers = headers.display().to_string();
    build.run(&["make", "-C", &headers, &sources, "modules"])?;
    build.run(&["strip", "--strip-debug", MODULE])?;
    let hostile = root.join(SOURCES).join(HOSTILE).display().to_string();
    build.run(&["gcc", "-O2", "-Wall", "-static", "-o", "hostile-backend", &hostile])?;
    let mut archive = Archive::new(Vec::new());
    archive.copy(&format!("lib/{MODULE}"), &build.folder().join(MODULE))?;
    archive.copy("usr/sbin/ethtool", &tree.join("sbin/ethtool"))?;
    for library in LIBRARIES {
        archive.copy(library, &tree.join(library))?;
    }
    archive.copy("usr/bin/hostile-backend", &build.folder().join("hostile-backend"))?;
    std::fs::write(build.folder().join(ARCHIVE), archive.finish()?)?;
    build.keep(ARCHIVE, &built)?;
    std::fs::write(&stamp, state)?;
    Ok(built)
}

/// Unpacks the headers of a kernel, and ethtool, into `root`; returns the folder in which modules are built.
pub(super) fn unpack_headers(cache: &Path, release: &str, root: &Path) -> anyhow::Result<PathBuf> {
    let mut apt = Apt::new(cache);
    let name = format!("linux-headers-{release}");
    let download = |apt: &Apt| {
        let mut names = vec![name.clone()];
        names.extend(ETHTOOL.map(str::to_owned));
        for prefix in ["linux-headers-", "linux-kbuild-"] {
            names.extend(apt.depends(&name, prefix)?);
        }
        let packages = apt.resolve(&names)?;
        apt.download(&packages)?;
        anyhow::Ok(packages)
    };
    let packages = download(&apt).or_else(|_| {
        apt.update()?;
        download(&apt)
    })?;
    packages.iter().try_for_each(|package| apt.unpack(package, root))?;
    // Its Makefile includes that of the common headers by an absolute path.
    let folder = root.join("usr/src").join(&name);
    let makefile = folder.join("Makefile");
    let text = std::fs::read_to_string(&makefile)?;
    let text = text.replace("include /usr/src", &format!("include {}/usr/src", root.display()));
    std::fs::write(&makefile, text)?;
    Ok(folder)
}

/// Returns the names and contents of the module's sources, then the hostile backend.
fn sources(folder: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let mut sources = module_sources(folder)?;
    sources.push(("hostile-backend".to_owned(), std::fs::read_to_string(folder.join(HOSTILE))?));
    Ok(sources)
}

/// Returns the names and contents of a module's sources, in the order of their names.
pub(super) fn module_sources(folder: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let mut sources = vec![];
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name == "Kbuild" || name.ends_with(".c") || name.ends_with(".h") {
            sources.push((name, std::fs::read_to_string(&path)?));
        }
    }
    sources.sort();
    Ok(sources)
}

/// Returns the release in a bzImage (Documentation/arch/x86/boot.rst): kernel_version at 0x20e is the offset of the
/// version text, less 0x200. The release is its first word.
pub(super) fn release(image: &[u8]) -> Option<String> {
    let at = usize::from(u16::from_le_bytes(image.get(0x20e..0x210)?.try_into().ok()?)) + 0x200;
    let text = image.get(at..)?;
    let end = text.iter().take(256).position(|byte| matches!(byte, b' ' | 0))?;
    let release = std::str::from_utf8(&text[..end]).ok()?;
    release.starts_with(|c: char| c.is_ascii_digit()).then(|| release.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_of_a_kernel_image_is_its_first_word() {
        let mut image = vec![0; 0x400];
        image[0x20e..0x210].copy_from_slice(&0x100u16.to_le_bytes());
        let text = b"6.1.0-9-amd64 (builder) #1 SMP\0";
        image[0x300..0x300 + text.len()].copy_from_slice(text);
        assert_eq!(release(&image).as_deref(), Some("6.1.0-9-amd64"));
        assert_eq!(release(&image[..0x300]), None);
        assert_eq!(release(&[0; 0x400]), None);
    }
}
