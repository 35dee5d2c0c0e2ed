//! Kernel with iommufd, which Debian's kernels lack: Linux 6.12 from Debian's package of its source, with only
//! the options that the machine needs and without modules. The build takes a few minutes and is kept.

use std::path::{Path, PathBuf};

use super::apt::Apt;
use super::build::Build;
use crate::tools::{self, Tool, Toolbox};

/// Tools that the build needs.
static NEEDS: &[&Tool] = &[
    &tools::GCC,
    &tools::MAKE,
    &tools::BISON,
    &tools::FLEX,
    &tools::BC,
    &tools::LIBELF,
    &tools::XZ,
];

/// Source package in the release or its backports.
const SOURCE: &str = "linux-source-6.12";

/// Enabled options; all others that can be disabled are.
const OPTIONS: &str = include_str!("iommufd.config");

/// Builds the kernel below `cache` unless it is there, and returns the path of its image.
pub(super) fn kernel(
    cache: &Path,
    toolbox: &Toolbox,
    may_install: bool,
) -> anyhow::Result<PathBuf> {
    let (built, stamp) = (cache.join("linux-iommufd.image"), cache.join("linux-iommufd.config"));
    if built.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|text| text == OPTIONS) {
        return Ok(built);
    }
    let build = Build::begin(cache.join("linux-source"), NEEDS, toolbox, may_install)?;
    let package = Apt::backport(SOURCE, build.folder())?;
    println!("building Linux with iommufd, which takes a few minutes");
    build.run(&["dpkg-deb", "--extract", &package, "package"])?;
    let archive = format!("package/usr/src/{SOURCE}.tar.xz");
    build.run(&["tar", "-xf", &archive, "--strip-components=1", "-C", "tree"])?;
    std::fs::write(build.folder().join("options"), OPTIONS)?;
    build.make(&["KCONFIG_ALLCONFIG=../options", "allnoconfig"])?;
    build.is_configured("tree/.config", OPTIONS)?;
    build.make(&["bzImage"])?;
    build.keep("tree/arch/x86/boot/bzImage", &built)?;
    std::fs::write(&stamp, OPTIONS)?;
    Ok(built)
}
