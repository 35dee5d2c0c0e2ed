//! Module of grant windows (`linux/grant-window`), as a part of a guest's root file system, built against Debian's
//! headers for the kernel that the guests boot; and another part with the agent and the module of `xen/tests`. The parts
//! are kept until the sources or the kernel change.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::apt::Release;
use super::build::{self, Build, BuildTools};
use super::cpio::Archive;
use super::images::Images;
use super::module::{self, Headers, Module, NEEDS, WINDOW, WINDOW_RAW};
use super::toolchain::Toolchain;

/// File names of the archives.
const DRIVER: &str = "window-driver.cpio";
const TESTS: &str = "window-tests.cpio";
/// Sources of the test agent, of the driver of a network card, and of what gives the domains of `xl` an IOMMU context.
const AGENT: &str = "xen/tests/agent.c";
const NIC: &str = "xen/tests/nic.c";
const IOMMU: &str = "xen/tests/iommu-domain.c";

pub(crate) struct Archives {
    /// Part with the module.
    pub(crate) driver: PathBuf,
    /// Part with the module, the test module and the test agent.
    pub(crate) tests: PathBuf,
}

/// Builds the archives for a release's kernel, by default this computer's, below `cache`, or finds them there.
pub(crate) fn archives(
    root: &Path,
    images: &Images,
    cache: &Path,
    tools: BuildTools<'_>,
    suite: Option<Release>,
) -> anyhow::Result<Archives> {
    let _lock = build::lock(cache, "window-driver")?;
    let image = std::fs::read(images.path("vmlinuz"))?;
    let release = module::release(&image).context("the kernel's image has no version")?;
    let sources = [(&WINDOW, WINDOW.sources(root)?), (&WINDOW_RAW, WINDOW_RAW.sources(root)?)];
    let programs = [AGENT, NIC, IOMMU].map(|file| std::fs::read_to_string(root.join(file)));
    let programs = programs.into_iter().collect::<Result<String, _>>()?;
    let built = Archives { driver: cache.join(DRIVER), tests: cache.join(TESTS) };
    let stamp = cache.join("window-driver.stamp");
    let files = sources.iter().flat_map(|(_, sources)| sources);
    let state = files.fold(release.clone() + &programs, |state, (name, text)| state + name + text);
    if built.driver.is_file()
        && built.tests.is_file()
        && std::fs::read_to_string(&stamp).is_ok_and(|text| text == state)
    {
        return Ok(built);
    }
    println!("building {} for Linux {release}", WINDOW.file);
    let build = Build::begin(cache.join("window-driver"), NEEDS, tools)?;
    let headers = match suite {
        Some(suite) => Headers::In(Toolchain::of(suite, &release, cache)?),
        None => module::headers_of(cache, &release, &build.folder().join("tree"))?,
    };
    for (module, sources) in &sources {
        module.compile(&build, &headers, sources)?;
    }
    let (public, driver) = (root.join("xen/include/public"), root.join("linux/grant-window"));
    let include = [&public, &driver].map(|folder| format!("-I{}", folder.display()));
    for (program, source) in [("agent", AGENT), ("nic", NIC)] {
        let source = root.join(source).display().to_string();
        let words = ["gcc", "-O2", "-Wall", "-Werror", "-static", "-pthread"];
        let rest = [include[0].as_str(), &include[1], "-o", program, &source];
        build.run(&[words.as_slice(), &rest].concat())?;
    }
    let (preloaded, source) = (build.folder().join("iommu-domain.so"), root.join(IOMMU));
    let words = ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o"];
    let paths = [preloaded.display().to_string(), source.display().to_string()];
    build.run(&[words.as_slice(), &[&paths[0], &paths[1]]].concat())?;
    let modules: &[&Module] = &[&WINDOW, &WINDOW_RAW];
    for (name, modules, tests) in [(DRIVER, &modules[..1], false), (TESTS, modules, true)] {
        let mut archive = Archive::new(Vec::new());
        for module in modules {
            archive.copy(&format!("lib/{}", module.file), &build.folder().join(module.file))?;
        }
        if tests {
            archive.copy("usr/bin/agent", &build.folder().join("agent"))?;
            archive.copy("usr/bin/nic", &build.folder().join("nic"))?;
            archive.copy("lib/iommu-domain.so", &preloaded)?;
        }
        std::fs::write(build.folder().join(name), archive.finish()?)?;
        build.copy(name, &cache.join(name))?;
    }
    std::fs::remove_dir_all(build.folder())?;
    std::fs::write(&stamp, state)?;
    Ok(built)
}
