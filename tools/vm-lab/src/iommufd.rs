//! Kernel with iommufd, which Debian's kernels lack: Linux 6.12 from Debian's package of its source, with only
//! the options that the machine needs and without modules. The build takes a few minutes and is kept.

use std::path::{Path, PathBuf};

use super::build::{self, Build, BuildTools};

/// Source package in the release or its backports.
const SOURCE: &str = "linux-source-6.12";

/// Enabled options; all others that can be disabled are.
const OPTIONS: &str = include_str!("iommufd.config");

/// Builds the kernel below `cache` unless it is there, and returns the path of its image.
pub(crate) fn kernel(cache: &Path, tools: BuildTools<'_>) -> anyhow::Result<PathBuf> {
    let _lock = build::lock(cache, "linux-iommufd")?;
    let (built, stamp) = (cache.join("linux-iommufd.image"), cache.join("linux-iommufd.config"));
    if built.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|text| text == OPTIONS) {
        return Ok(built);
    }
    let folder = cache.join("linux-source");
    let build = Build::begin(folder, build::LINUX_NEEDS, tools)?;
    println!("building Linux with iommufd, which takes a few minutes");
    build.unpack_linux(SOURCE, OPTIONS)?;
    build.make(&["bzImage"])?;
    build.keep("tree/arch/x86/boot/bzImage", &built)?;
    std::fs::write(&stamp, OPTIONS)?;
    Ok(built)
}
