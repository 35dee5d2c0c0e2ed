//! Boots: runs machines, several at the same time, until each scenario has a result.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use super::complaints::complaints;
use super::machine::{Heard, Machine, Running};
use super::overlay::{self, Orders};
use super::report;
use super::results::{self, Line, Tally};
use super::scenario::{Scenario, deal};
use super::setting::Setting;

/// Time limit in seconds for the start of a machine on an idle computer.
const START: u64 = 30;
/// Time limit in seconds between the end of a scenario and the start of the next, or power off.
const BETWEEN: u64 = 20;
/// Maximum sum of the time limits, in seconds, of the scenarios that share a boot.
const SHARED: u32 = 240;
/// Number of directories of earlier runs that are kept.
const KEPT: usize = 5;

/// Queue of boots, and the results so far.
pub(crate) struct Boots<'a> {
    setting: &'a Setting<'a>,
    waiting: Mutex<Vec<Vec<Scenario>>>,
    tallies: Mutex<Vec<Tally>>,
    /// Lines of JSON that scenarios measured, for `ringfence-bench seeds --xen`.
    rows: Mutex<Vec<u8>>,
}

impl<'a> Boots<'a> {
    /// Distributes `selected` to boots.
    pub(crate) fn new(setting: &'a Setting<'a>, selected: Vec<Scenario>) -> Boots<'a> {
        let mut waiting = deal(selected, SHARED);
        waiting.reverse();
        Boots {
            setting,
            waiting: Mutex::new(waiting),
            tallies: Mutex::default(),
            rows: Mutex::default(),
        }
    }

    /// Runs all boots, `machines` at a time, and returns the results.
    pub(crate) fn run(self, machines: u32) -> anyhow::Result<Vec<Tally>> {
        let machines = usize::try_from(machines)?.min(lock(&self.waiting).len());
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..machines).map(|_| scope.spawn(|| self.work())).collect();
            workers.into_iter().try_for_each(|worker| {
                worker.join().unwrap_or_else(|_| anyhow::bail!("the harness itself failed"))
            })
        })?;
        let rows = self.rows.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !rows.is_empty() {
            let file = self.setting.folder.join("rows.json");
            std::fs::write(&file, rows)?;
            println!("rows for `ringfence-bench seeds EXPERIMENT --xen`: {}", file.display());
        }
        let tallies = self.tallies.into_inner();
        Ok(tallies.unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    fn work(&self) -> anyhow::Result<()> {
        loop {
            let Some(scenarios) = lock(&self.waiting).pop() else {
                return Ok(());
            };
            let rest = self.boot(&scenarios)?;
            if !rest.is_empty() {
                lock(&self.waiting).push(rest);
            }
        }
    }

    /// Runs one boot. Returns the scenarios that did not run because the machine ended in an earlier one.
    fn boot(&self, scenarios: &[Scenario]) -> anyhow::Result<Vec<Scenario>> {
        let setting = self.setting;
        let kind = scenarios[0].machine;
        let folder = setting.folder.join(format!("{}-{}", kind.name(), scenarios[0].name));
        std::fs::create_dir_all(&folder)?;
        let names: Vec<&str> = scenarios.iter().map(|scenario| scenario.name.as_str()).collect();
        println!("[{}] boots for {}", kind.name(), names.join(", "));
        let orders = Orders {
            scenarios: scenarios.iter().map(|s| (s.name.as_str(), s.limit)).collect(),
            patience: setting.patience,
            shell: false,
            debug: setting.hypervisor.is_some(),
            variables: &setting.variables,
            target: setting.target,
            tests: &setting.programs.tests,
        };
        let root = folder.join("root.cpio");
        overlay::write(&root, kind, &setting.images, setting.root, &setting.programs, &orders)?;
        let machine = Machine {
            kind,
            images: &setting.images,
            repository: setting.root,
            programs: &setting.programs,
            root: root.clone(),
            hypervisor: setting.hypervisor.clone(),
            options: &scenarios[0].options,
            iommufd: setting.iommufd.as_deref(),
            sampled: scenarios.iter().any(|scenario| scenario.wants_modes),
            counts_instructions: setting.counts_instructions,
            processors: setting.processors,
            share: folder.clone(),
            console: Some(folder.join("console.log")),
            path: setting.path.clone(),
        };
        let mut watch = Watch::new(machine.start()?, scenarios, setting.patience);
        let mut done = 0;
        let mut read = 0;
        while let Some(mut tally) = watch.next() {
            let complaints = complaints(&folder.join("console.log"), &mut read);
            let complaints = scenarios[done].unexpected(complaints);
            if tally.failures().is_empty() {
                tally.complain(&complaints);
            }
            done += 1;
            let mut text = report::scenario(kind.name(), &tally, setting.verbose);
            if !tally.failures().is_empty() {
                text += &report::logs(&folder);
            }
            print!("{text}");
            lock(&self.tallies).push(tally);
        }
        watch.finish();
        std::fs::remove_file(&root)?;
        let rows = std::fs::read(folder.join("rows.json")).unwrap_or_default();
        lock(&self.rows).extend(rows);
        Ok(scenarios[done..].to_vec())
    }
}

/// State of one running boot.
struct Watch<'a> {
    machine: Option<Running>,
    scenarios: &'a [Scenario],
    patience: u32,
    done: usize,
    /// Lines that the machine printed outside of any scenario.
    stray: Vec<String>,
}

impl<'a> Watch<'a> {
    fn new(machine: Running, scenarios: &'a [Scenario], patience: u32) -> Watch<'a> {
        Watch { machine: Some(machine), scenarios, patience, done: 0, stray: vec![] }
    }

    /// Returns the next scenario's result; `None` if none is left or the machine has ended.
    fn next(&mut self) -> Option<Tally> {
        let scenario = self.scenarios.get(self.done)?;
        let machine = self.machine.as_ref()?;
        let mut tally = Tally::new(&scenario.name);
        let start = Instant::now();
        let mut begun = start;
        let mut running = false;
        let mut deadline = start + self.stretched(if self.done == 0 { START } else { BETWEEN });
        let broken = loop {
            let line = match machine.listen(deadline) {
                Heard::Line(line) => results::read(&line),
                Heard::Off if running => {
                    break "the machine went down in the middle of it".to_owned();
                }
                Heard::Off => break "the machine went down before it began".to_owned(),
                Heard::Nothing if running => {
                    break format!(
                        "it did not end in time ({} s)",
                        deadline.duration_since(begun).as_secs()
                    );
                }
                Heard::Nothing => break "the machine did not begin it in time".to_owned(),
            };
            match &line {
                // A scenario that reboots the machine begins again, and keeps its time limit.
                Line::Begin(name) if *name == scenario.name && !running => {
                    running = true;
                    begun = Instant::now();
                    // The machine ends the scenario at its limit itself, and reports more about it.
                    deadline = begun + self.stretched(u64::from(scenario.limit) + BETWEEN);
                }
                Line::End(name, _) if running && *name == scenario.name => {
                    tally.take(&line);
                    break String::new();
                }
                Line::Note(text) | Line::Other(text) if !running => self.stray.push(text.clone()),
                line if running => tally.take(line),
                _ => {}
            }
        };
        tally.time = begun.elapsed();
        if !broken.is_empty() {
            tally.notes.append(&mut self.stray);
            tally.break_off(broken);
            // The machine is off. Its remaining lines belong to no scenario.
            self.machine = None;
        }
        self.done += 1;
        Some(tally)
    }

    /// Waits until the machine has powered off, up to the time limit.
    fn finish(&mut self) {
        if let Some(machine) = self.machine.take() {
            machine.wait(self.stretched(BETWEEN));
        }
    }

    fn stretched(&self, seconds: u64) -> Duration {
        Duration::from_secs(seconds * u64::from(self.patience))
    }
}

/// Locks a mutex, also after a panic of another thread, which leaves the contents consistent.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Creates a directory below `runs`, named by the time, and removes the oldest ones.
pub(crate) fn new_folder(runs: &Path) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(runs)?;
    let mut old: Vec<PathBuf> =
        std::fs::read_dir(runs)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    old.sort();
    for folder in old.iter().rev().skip(KEPT - 1).filter(|folder| !in_use(folder)) {
        std::fs::remove_dir_all(folder)?;
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let folder = runs.join(format!("{:010}-{}", now.as_secs(), std::process::id()));
    std::fs::create_dir(&folder)?;
    Ok(folder)
}

/// Returns `true` if the process in the name of a run's directory still exists.
fn in_use(folder: &Path) -> bool {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    name.rsplit('-').next().is_some_and(|pid| Path::new("/proc").join(pid).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_directories_are_removed() {
        let runs = tempfile::tempdir().unwrap();
        for i in 0..9 {
            std::fs::create_dir(runs.path().join(format!("000000000{i}-none"))).unwrap();
        }
        let new = new_folder(runs.path()).unwrap();
        let mut left: Vec<_> =
            std::fs::read_dir(runs.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        left.sort();
        assert_eq!(left.len(), KEPT);
        assert_eq!(left.last(), Some(&new));
        assert!(left[0].ends_with("0000000005-none"));
    }
}
