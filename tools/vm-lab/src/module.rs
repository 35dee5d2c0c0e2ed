//! Kernel modules of `linux/`: their sources, the headers of Debian's kernels, and their builds. The headers are
//! unpacked, not installed.
//!
//! `cargo xtask vm modules` compiles every module for the kernels of this Debian release and of its backports.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use taskkit::tools::{self, Tool};

use super::apt::Apt;
use super::build::{Build, BuildTools};
use super::toolchain::Toolchain;

/// Tools of a build. Kbuild's objtool needs libelf.
pub(crate) static NEEDS: &[&Tool] = &[&tools::GCC, &tools::MAKE, &tools::LIBELF];

/// Kernel module with its sources in `linux/`.
pub(crate) struct Module {
    /// File name of the built module.
    pub(crate) file: &'static str,
    /// Folders of its sources, in the repository. They are built in one folder.
    folders: &'static [&'static str],
}

/// Headers of grant windows: the calls that several modules make, and the interface.
const CALLS: &str = "linux/include";
const INTERFACE: &str = "xen/include/public";

/// Network driver for guests.
pub(crate) static NETFRONT: Module =
    Module { file: "ringfence-netfront.ko", folders: &["linux/netfront", CALLS, INTERFACE] };
/// Device of the grant windows.
pub(crate) static WINDOW: Module =
    Module { file: "ringfence-window.ko", folders: &["linux/grant-window", CALLS, INTERFACE] };
/// Pools that virtio devices lend their backends.
pub(crate) static LENT_POOL: Module =
    Module { file: "ringfence-lent-pool.ko", folders: &["linux/lent-pool"] };
/// Module of the tests of grant windows.
pub(crate) static WINDOW_RAW: Module =
    Module { file: "window-raw.ko", folders: &["xen/tests/raw"] };

/// Metapackage of a Debian release. It depends on the headers of the newest kernel.
const NEWEST: &str = "linux-headers-amd64";
/// Options of make: the compiler's warnings are errors, and the module has no type information, whose generator newer
/// kernels would need.
const OPTIONS: [&str; 2] = ["KCFLAGS=-Werror", "CONFIG_DEBUG_INFO_BTF_MODULES="];

impl Module {
    /// Returns the names and contents of the sources, in a fixed order.
    pub(crate) fn sources(&self, root: &Path) -> anyhow::Result<Vec<(String, String)>> {
        let folders = self.folders.iter().map(|folder| sources_of(&root.join(folder)));
        Ok(folders.collect::<anyhow::Result<Vec<_>>>()?.concat())
    }

    /// Compiles the module in the folder of `build`.
    pub(crate) fn compile(
        &self,
        build: &Build<'_>,
        headers: &Headers,
        sources: &[(String, String)],
    ) -> anyhow::Result<()> {
        let folder = build.folder().join(self.file.trim_end_matches(".ko"));
        std::fs::create_dir_all(&folder)?;
        for (name, text) in sources {
            std::fs::write(folder.join(name), text)?;
        }
        match headers {
            Headers::Here(headers) => {
                let headers = headers.display().to_string();
                let source = format!("M={}", folder.display());
                let words = ["make", "-C", &headers, &source];
                build.run(&[&words, OPTIONS.as_slice(), &["modules"]].concat())?;
            }
            Headers::In(toolchain) => {
                toolchain.compile(&folder, &[OPTIONS.as_slice(), &["modules"]].concat())?;
            }
        }
        let built = folder.join(self.file);
        build.run(&["strip", "--strip-debug", &built.display().to_string()])?;
        Ok(std::fs::rename(built, build.folder().join(self.file))?)
    }
}

/// Headers of a kernel.
pub(crate) enum Headers {
    /// In this folder, for the compiler of this computer.
    Here(PathBuf),
    /// In a root with the compiler of another release.
    In(Toolchain),
}

/// Compiles every module for the newest kernel of this Debian release, and of its backports.
pub(crate) fn compile_all(root: &Path, cache: &Path, tools: BuildTools<'_>) -> anyhow::Result<()> {
    let modules = [&NETFRONT, &WINDOW, &LENT_POOL];
    let modules = modules.map(|module| Ok((module, module.sources(root)?)));
    let modules = modules.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let mut release = Apt::new(cache);
    release.update()?;
    for apt in [release, Apt::backports(cache)?] {
        let name = newest(&apt)?;
        let build = Build::begin(cache.join("modules"), NEEDS, tools)?;
        let headers = unpack_headers(&apt, &name, &[], &build.folder().join("tree"))?;
        for (module, sources) in &modules {
            let kernel = name.trim_start_matches("linux-headers-");
            module.compile(&build, &headers, sources).with_context(|| kernel.to_owned())?;
            println!("{} compiles without a warning for Linux {kernel}", module.file);
        }
    }
    Ok(())
}

/// Returns the package with the headers of the newest kernel.
fn newest(apt: &Apt) -> anyhow::Result<String> {
    let found = apt.depends(NEWEST, "linux-headers-")?;
    found.into_iter().next().with_context(|| format!("{NEWEST} names no kernel"))
}

/// Unpacks the headers of a kernel of this computer's release into `root`, with new package lists if the given ones do not do.
pub(crate) fn headers_of(cache: &Path, release: &str, root: &Path) -> anyhow::Result<Headers> {
    let mut apt = Apt::new(cache);
    let name = format!("linux-headers-{release}");
    apt.with_lists(|apt| unpack_headers(apt, &name, &[], root))
}

/// Unpacks the package `name` with a kernel's headers, those it needs, and `others`.
pub(crate) fn unpack_headers(
    apt: &Apt,
    name: &str,
    others: &[&str],
    root: &Path,
) -> anyhow::Result<Headers> {
    let mut names = vec![name.to_owned()];
    names.extend(others.iter().map(|other| (*other).to_owned()));
    for prefix in ["linux-headers-", "linux-kbuild-"] {
        names.extend(apt.depends(name, prefix)?);
    }
    let packages = apt.resolve(&names)?;
    apt.download(&packages)?;
    packages.iter().try_for_each(|package| apt.unpack(package, root))?;
    // Its Makefile includes that of the common headers by an absolute path.
    let folder = root.join("usr/src").join(name);
    let makefile = folder.join("Makefile");
    let text = std::fs::read_to_string(&makefile)?;
    let text = text.replace("include /usr/src", &format!("include {}/usr/src", root.display()));
    std::fs::write(&makefile, text)?;
    Ok(Headers::Here(folder))
}

/// Returns the names and contents of the files in a folder that a build needs, in the order of their names.
fn sources_of(folder: &Path) -> anyhow::Result<Vec<(String, String)>> {
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
pub(crate) fn release(image: &[u8]) -> Option<String> {
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
