//! Settings of a run: the images, programs and options that all boots share.

use std::path::{Path, PathBuf};

use taskkit::tools::Toolbox;

use crate::apt::Release;
use crate::args::PROCESSORS;
use crate::build::BuildTools;
use crate::parts::Part;
use crate::program::{self, Dom0Part, ProgramSelection};
use crate::scenario::Scenario;
use crate::unavailable::Unavailable;
use crate::{boots, debug_kernel, guest_driver, images, lent_pool, newest_kernel, window_driver};

/// State that all boots of a run share.
pub(crate) struct Setting<'a> {
    pub(crate) root: &'a Path,
    /// Cargo's target directory.
    pub(crate) target: &'a Path,
    pub(crate) images: images::Images,
    pub(crate) programs: program::Programs,
    /// Directory of this run, for root file systems and logs.
    pub(crate) folder: PathBuf,
    pub(crate) hypervisor: Option<PathBuf>,
    /// Path of the kernel with iommufd, if a machine boots it.
    pub(crate) iommufd: Option<PathBuf>,
    pub(crate) path: std::ffi::OsString,
    pub(crate) patience: u32,
    pub(crate) counts_instructions: bool,
    pub(crate) processors: u32,
    pub(crate) variables: Vec<String>,
    pub(crate) verbose: bool,
}

/// Prepares images, programs and a directory for a run of these scenarios.
pub(crate) fn prepare<'a>(
    root: &'a Path,
    target: &'a Path,
    release: Option<Release>,
    cache: &Path,
    toolbox: &Toolbox,
    selection: ProgramSelection<'_>,
    selected: &[Scenario],
) -> anyhow::Result<Setting<'a>> {
    if !cfg!(target_arch = "x86_64") {
        return Err(
            Unavailable("the machines are x86_64, as is the program in them".to_owned()).into()
        );
    }
    let images = images::prepare(release, cache, toolbox)?;
    let tests = selected.iter().flat_map(|scenario| &scenario.tests).map(String::as_str).collect();
    let programs = program::build(root, target, selection, &tests)?;
    Ok(Setting {
        root,
        target,
        images,
        programs,
        folder: boots::new_folder(&target.join("vm/runs"))?,
        hypervisor: None,
        iommufd: None,
        path: toolbox.path().clone(),
        patience: 4,
        counts_instructions: false,
        processors: PROCESSORS,
        variables: vec![],
        verbose: false,
    })
}

/// Adds the parts of root file systems with the kernel modules and kernels that scenarios want. Each is built below `cache`
/// unless it is there.
pub(crate) fn add_driver_parts(
    setting: &mut Setting<'_>,
    selected: &[Scenario],
    release: Option<Release>,
    cache: &Path,
    tools: BuildTools<'_>,
) -> anyhow::Result<()> {
    let (root, images) = (setting.root, &setting.images);
    let wants = |part: fn(&Scenario) -> bool| selected.iter().any(part);
    if wants(|scenario| scenario.wants_driver) {
        let driver = guest_driver::archive(release, root, images, cache, tools)?;
        setting.programs.guest_driver = Some(driver);
    }
    if wants(|scenario| scenario.wants_windows) {
        let tests = wants(|scenario| scenario.wants_window_tests);
        let archives = window_driver::archives(root, images, cache, tools, release)?;
        setting.programs.window_driver = Some(archives.driver);
        setting.programs.window_tests = tests.then_some(archives.tests);
    }
    if wants(|scenario| scenario.wants_lent_pool) {
        let module = lent_pool::archive(release, root, images, cache, tools)?;
        setting.programs.lent_pool = Some(module);
    }
    let parts = &mut setting.programs.dom0_parts;
    let mut add = |wants: &dyn Fn(&Scenario) -> bool,
                   make: &dyn Fn() -> anyhow::Result<PathBuf>|
     -> anyhow::Result<()> {
        let wanting = selected.iter().filter(|scenario| wants(scenario));
        let scenarios: Vec<String> = wanting.map(|scenario| scenario.name.clone()).collect();
        if !scenarios.is_empty() {
            parts.push(Dom0Part { file: make()?, scenarios });
        }
        Ok(())
    };
    add(&|scenario| scenario.wants_newest_kernel, &|| newest_kernel::archive(root, cache, tools))?;
    add(&|scenario| scenario.wants_debug_kernel, &|| {
        debug_kernel::archive(root, images, cache, tools)
    })?;
    for part in Part::ALL {
        add(&|scenario| scenario.parts.contains(&part), &|| {
            part.archive(release, images, cache, tools)
        })?;
    }
    Ok(())
}
