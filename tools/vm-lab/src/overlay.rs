//! Project's part of a machine's root file system, which each boot appends to the images: the files of `vm/`, the
//! programs, and the orders of the boot.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::cpio::Archive;
use super::images::Images;
use super::machine::Kind;
use super::program::{Dom0Part, Programs};

/// Orders of one boot.
pub(crate) struct Orders<'a> {
    /// Scenarios in their order, with their time limits in seconds.
    pub(crate) scenarios: Vec<(&'a str, u32)>,
    /// Factor by which every time limit is multiplied.
    pub(crate) patience: u32,
    /// Set if the boot ends with a shell on the console.
    pub(crate) shell: bool,
    /// Set for a debug build of the hypervisor.
    pub(crate) debug: bool,
    /// Variables for the scenarios, `NAME=VALUE`.
    pub(crate) variables: &'a [String],
    /// Directory in which programs were built on this computer.
    pub(crate) target: &'a Path,
    /// Names of integration tests, and their files on this computer.
    pub(crate) tests: &'a [(String, PathBuf)],
}

/// Writes the complete root file system of a machine to `to`.
pub(crate) fn write(
    to: &Path,
    kind: Kind,
    images: &Images,
    repository: &Path,
    programs: &Programs,
    orders: &Orders<'_>,
) -> anyhow::Result<()> {
    let base = images.path(if kind.is_xen() { "dom0.cpio" } else { "linux.cpio" });
    let mut out = File::create(to).with_context(|| to.display().to_string())?;
    let mut base = File::open(&base).with_context(|| base.display().to_string())?;
    io::copy(&mut base, &mut out)?;
    let parts = programs.dom0_parts.iter().filter(|part| kind.is_xen() && orders.want(part));
    let module = programs.lent_pool.iter().filter(|_| kind.has_pool());
    for file in parts.map(|part| &part.file).chain(module) {
        out.write_all(&std::fs::read(file).with_context(|| file.display().to_string())?)?;
    }

    let ours = repository.join("vm");
    let init = if kind.is_xen() { "xen/dom0-init" } else { "linux/init" };
    let mut archive = Archive::new(BufWriter::new(out));
    archive.file("init", true, &std::fs::read(ours.join(init))?)?;
    archive.file("vm/orders", false, orders.text(kind).as_bytes())?;
    everywhere(&mut archive, repository, programs)?;
    if kind.is_xen() {
        if let Some(program) = &programs.bench {
            archive.copy(BENCH, program)?;
            // Most guests run without it, and each must unpack its root file system into memory.
            let mut bench = Archive::new(Vec::new());
            bench.copy(BENCH, program)?;
            archive.file("boot/bench.cpio", false, &bench.finish()?)?;
        }
        if let Some(driver) = &programs.guest_driver {
            archive.copy("boot/driver.cpio", driver)?;
        }
        if let Some(driver) = &programs.window_driver {
            archive.copy("boot/window.cpio", driver)?;
        }
        if let Some(tests) = &programs.window_tests {
            archive.copy("boot/window-tests.cpio", tests)?;
        }
        let mut guest = Archive::new(Vec::new());
        guest.file("init", true, &std::fs::read(ours.join("xen/guest-init"))?)?;
        guest.file("vm/orders", false, orders.text(kind).as_bytes())?;
        everywhere(&mut guest, repository, programs)?;
        archive.file("boot/ours.cpio", false, &guest.finish()?)?;
    } else {
        for (place, program) in [(BENCH, &programs.bench), ("usr/bin/engines", &programs.engines)] {
            if let Some(program) = program {
                archive.copy(place, program)?;
            }
        }
    }
    archive.finish()?;
    Ok(())
}

/// Path of the benchmark program in machines and guests.
const BENCH: &str = "usr/bin/ringfence-bench";

/// Adds the files of every machine and guest: `vm/`, `dist/`, and the common programs.
fn everywhere<W: Write>(
    archive: &mut Archive<W>,
    repository: &Path,
    programs: &Programs,
) -> io::Result<()> {
    for folder in ["vm/lib", "vm/xen", "vm/linux", "dist"] {
        archive.tree(folder, &repository.join(folder))?;
    }
    archive.copy("usr/bin/ringfence", &programs.ringfence)?;
    archive.copy("usr/bin/traffic", &programs.traffic)
}

impl Orders<'_> {
    /// Returns `true` if a scenario of the boot wants the part.
    fn want(&self, part: &Dom0Part) -> bool {
        self.scenarios.iter().any(|(name, _)| part.scenarios.iter().any(|other| other == name))
    }

    /// Formats the orders for the shell: variables, and a line `SCENARIO LIMIT` for each scenario.
    fn text(&self, kind: Kind) -> String {
        let tests = self.tests.iter().map(|(name, file)| format!("{name}={}", file.display()));
        let tests: Vec<String> = tests.collect();
        let flag = |on: bool| if on { "yes" } else { "" };
        let mut text = format!(
            "PATIENCE={}\nSHELL_WANTED={}\nDEBUG_XEN={}\nSUITE={}\nTARGET='{}'\nTESTS='{}'\nSCENARIOS=\"\n",
            self.patience,
            flag(self.shell),
            flag(self.debug),
            if kind.is_xen() { "xen" } else { "linux" },
            self.target.display(),
            tests.join(" "),
        );
        for variable in self.variables {
            text.insert_str(0, &format!("{variable}\n"));
        }
        for (name, limit) in &self.scenarios {
            text += &format!("{name} {limit}\n");
        }
        text + "\"\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders() -> Orders<'static> {
        Orders {
            scenarios: vec![("hello", 30), ("ping", 60)],
            patience: 4,
            shell: false,
            debug: true,
            variables: &[],
            target: Path::new("/t"),
            tests: &[],
        }
    }

    #[test]
    fn part_is_for_machines_of_its_scenarios_only() {
        let part = |scenarios: &[&str]| Dom0Part {
            file: PathBuf::new(),
            scenarios: scenarios.iter().map(|name| (*name).to_owned()).collect(),
        };
        assert!(orders().want(&part(&["grub", "ping"])));
        assert!(!orders().want(&part(&["grub", "pin"])));
    }

    #[test]
    fn orders_are_formatted_for_shell() {
        let tests = [("uplink".to_owned(), PathBuf::from("/t/uplink-5"))];
        let variables = ["ROUNDS=7".to_owned()];
        let orders = Orders { tests: &tests, variables: &variables, ..orders() };
        assert_eq!(
            orders.text(Kind::Xen),
            "ROUNDS=7\nPATIENCE=4\nSHELL_WANTED=\nDEBUG_XEN=yes\nSUITE=xen\nTARGET='/t'\nTESTS='uplink=/t/uplink-5'\nSCENARIOS=\"\nhello 30\nping 60\n\"\n"
        );
    }
}
