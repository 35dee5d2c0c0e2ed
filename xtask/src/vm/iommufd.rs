//! A kernel with iommufd, which no kernel of Debian's has (its configurations leave it out): Linux 6.12 out of
//! Debian's package of its source, with what the machine needs and no more, nothing of it in modules. The build
//! takes a few minutes, and is kept.

use std::path::{Path, PathBuf};

use super::apt::Apt;
use super::build::Build;
use crate::tools::{self, Tool, Toolbox};

/// What the build needs installed.
static NEEDS: &[&Tool] = &[
    &tools::GCC,
    &tools::MAKE,
    &tools::BISON,
    &tools::FLEX,
    &tools::BC,
    &tools::LIBELF,
    &tools::XZ,
];

/// The release's own, or in its backports.
const SOURCE: &str = "linux-source-6.12";

/// What is switched on; everything else that can be off is off.
const OPTIONS: &str = include_str!("iommufd.config");

/// Builds it below `cache`, or finds that it is there already: the path of its image.
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
