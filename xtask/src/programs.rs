//! Runs test programs, two at a time. Their output is printed if a test failed. A program that must be alone runs after the
//! others.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use taskkit::exec::{Cmd, TestRun};
use taskkit::text::{count, duration};

use crate::built::Program;

/// Number of programs that run at the same time. Each runs as many tests at a time as there are processors.
const AT_ONCE: usize = 2;

/// Starts of the variables that test programs inherit. Others can hide a fault on the developer's computer that shows on
/// others, or make one: `PYTHONUNBUFFERED` flushes lines that a program forgets to flush, and `LC_ALL` translates messages.
const INHERITED: &[&str] = &[
    "CARGO",
    "HOME",
    "LD_LIBRARY_PATH",
    "PATH",
    "PROPTEST_",
    "RINGFENCE_",
    "RUSTUP_",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
];

/// Test program with its arguments.
pub(crate) struct Order {
    pub(crate) program: Program,
    pub(crate) args: Vec<String>,
    /// Set if no other program may run meanwhile.
    pub(crate) is_alone: bool,
    /// PATH in place of that of [`Setting`].
    pub(crate) path: Option<OsString>,
}

/// Environment of test programs.
#[derive(Default)]
pub(crate) struct Setting {
    pub(crate) env: Vec<(String, OsString)>,
    /// Set if the programs print the duration of each test.
    pub(crate) durations: bool,
    /// Set if nothing is printed.
    pub(crate) is_quiet: bool,
    /// Set if only programs that failed are printed.
    pub(crate) is_brief: bool,
    /// Directory for the output of each failed test, and the start of the names of the files in it.
    pub(crate) logs: Option<(PathBuf, String)>,
}

impl Setting {
    /// Returns the command that runs a program.
    pub(crate) fn command(&self, file: &Path, args: &[String]) -> Cmd {
        let mut command = Cmd::new(file).args(args.iter().map(String::as_str));
        command =
            command.env_inherit_only(INHERITED).env("LANG", "C.UTF-8").args(["--show-output"]);
        if self.durations {
            // libtest accepts the option from stable compilers only with this variable.
            command = command.args(["-Zunstable-options", "--report-time"]);
            command = command.env("RUSTC_BOOTSTRAP", "1");
        }
        self.env.iter().fold(command, |command, (name, value)| command.env(name, value))
    }
}

/// Runs the programs. Names of tests in the result have the program's name before them.
pub(crate) fn run(orders: Vec<Order>, setting: &Setting) -> TestRun {
    let total = Mutex::new(TestRun { success: true, ..TestRun::default() });
    let (alone, shared): (Vec<_>, Vec<_>) = orders.into_iter().partition(|order| order.is_alone);
    work(shared, AT_ONCE, setting, &total);
    work(alone, 1, setting, &total);
    total.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn work(orders: Vec<Order>, at_once: usize, setting: &Setting, total: &Mutex<TestRun>) {
    let queue = Mutex::new(VecDeque::from(orders));
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    let Some(order) = next else { break };
                    let start = Instant::now();
                    let ended = one(&order, setting);
                    let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                    let is_failed = ended.results.failed > 0 || !ended.results.success;
                    if !setting.is_quiet && (is_failed || !setting.is_brief) {
                        print(&order.program, &ended, start.elapsed());
                    }
                    total.add(ended.results);
                }
            });
        }
    });
}

/// Program of tests that ended.
struct EndedProgram {
    results: TestRun,
    output: Vec<u8>,
}

/// Runs one program, and reads the results of its tests.
fn one(order: &Order, setting: &Setting) -> EndedProgram {
    let mut command = setting.command(&order.program.file, &order.args);
    if let Some(path) = &order.path {
        command = command.env("PATH", path);
    }
    let name = order.program.name();
    let (mut run, output) =
        command.run_tests_silently(&order.program.folder).unwrap_or_else(|error| {
            (TestRun::default(), format!("cannot be started: {error}\n").into_bytes())
        });
    if !run.success && run.failures.is_empty() {
        run.failed += 1;
        run.failures.push((String::new(), "the program ended without a result".to_owned()));
    }
    for (test, _) in run.skipped.iter_mut().chain(&mut run.failures) {
        *test = format!("{name} {test}").trim_end().to_owned();
    }
    run.times.iter_mut().for_each(|(test, _)| *test = format!("{name} {test}"));
    if let Some((folder, start)) = &setting.logs {
        for (test, _) in &run.failures {
            let file = folder.join(format!("{start}{}.log", file_name(test)));
            // The failure itself is reported also without its log.
            if let Err(error) = std::fs::write(&file, log(test, &output)) {
                println!("{}: {error}", file.display());
            }
        }
    }
    EndedProgram { results: run, output }
}

/// Returns the name of a test as a part of a file name: `net/vif a::b` becomes `net-vif-a-b`.
fn file_name(test: &str) -> String {
    let is_kept = |c: char| c.is_alphanumeric() || c == '_';
    let words: Vec<&str> = test.split(|c| !is_kept(c)).filter(|word| !word.is_empty()).collect();
    words.join("-")
}

/// Returns the part of a program's output that belongs to `test`, and then all of it: processes that the test started write
/// between the lines of other tests.
fn log(test: &str, output: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(output);
    let name = test.split_once(' ').map_or("", |(_, name)| name);
    let start = format!("---- {name} stdout ----");
    let own = text.split_once(&start).map(|(_, rest)| rest.split("\n---- ").next().unwrap_or(rest));
    let own = own.map_or(String::new(), |own| format!("{start}{own}\n\n"));
    format!("{own}==== output of the whole program\n{text}").into_bytes()
}

fn print(program: &Program, ended: &EndedProgram, time: Duration) {
    let run = &ended.results;
    let mut line = format!("{}: {}", program.name(), count(run.ran(), "test"));
    for (number, what) in [(run.failed, "FAILED"), (run.skipped.len() as u64, "skipped")] {
        if number > 0 {
            line += &format!(", {number} {what}");
        }
    }
    let mut out = std::io::stdout().lock();
    // A reader that is gone is no failure of a test.
    if run.failed > 0 || !run.success {
        let _ = writeln!(out, "==== output of {}", program.name());
        let _ = out.write_all(&ended.output);
    }
    let _ = writeln!(out, "{line}, {}", duration(time));
}

/// Returns the slowest tests, longest first.
pub(crate) fn slowest(run: &TestRun, most: usize) -> Vec<(String, Duration)> {
    let mut times = run.times.clone();
    times.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
    times.truncate(most);
    times
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::built::Kind;

    fn order(name: &str, script: &str, is_alone: bool) -> Order {
        let program = Program {
            krate: "k".to_owned(),
            target: name.to_owned(),
            kind: Kind::Integration,
            file: "/bin/sh".into(),
            folder: "/".into(),
        };
        Order { program, args: vec!["-c".to_owned(), script.to_owned()], is_alone, path: None }
    }

    /// The output of these programs would look like that of this one's tests.
    fn quiet() -> Setting {
        Setting { is_quiet: true, ..Setting::default() }
    }

    #[test]
    fn results_are_summed_and_named_by_program() {
        let good = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored'";
        let bad =
            "echo 'test x ... FAILED'; echo 'test result: FAILED. 1 passed; 1 failed'; exit 1";
        let orders = vec![order("a", good, false), order("b", bad, true)];
        let run = run(orders, &quiet());
        assert_eq!((run.passed, run.failed, run.success), (3, 1, false));
        assert_eq!(run.failures, [("k/b x".to_owned(), String::new())]);
    }

    #[test]
    fn program_that_ends_by_signal_is_a_failure() {
        let run = run(vec![order("a", "kill -9 $$", false)], &quiet());
        assert_eq!((run.failed, run.success), (1, false));
        assert_eq!(run.failures[0].0, "k/a");
    }

    #[test]
    fn failed_test_leaves_its_output_in_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let script = "echo '---- a::x stdout ----'; echo the cause; echo '---- y stdout ----'; echo fine; \
                      echo 'test a::x ... FAILED'; echo 'test result: FAILED. 1 passed; 1 failed'; exit 1";
        let logs = Some((folder.path().to_owned(), "3-".to_owned()));
        let run = run(vec![order("a", script, false)], &Setting { logs, ..quiet() });
        assert_eq!(run.failed, 1);
        let text = std::fs::read_to_string(folder.path().join("3-k-a-a-x.log")).unwrap();
        assert!(
            text.starts_with("---- a::x stdout ----\nthe cause\n\n====") && text.contains("fine"),
            "{text}"
        );
    }

    #[test]
    fn variables_beside_the_inherited_ones_are_absent() {
        // A shell itself sets PWD, OLDPWD, SHLVL and _.
        let known = INHERITED.join("|");
        let script = format!(
            "! env | grep -vE '^({known}|LANG=C.UTF-8$|PWD=|OLDPWD=|SHLVL=|_=)' && echo 'test result: ok. 1 passed'"
        );
        let run = run(vec![order("a", &script, false)], &quiet());
        assert!(run.success, "{run:?}");
    }

    #[test]
    fn program_that_is_alone_begins_after_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ended").display().to_string();
        let late = format!("[ -e {file} ] && echo 'test result: ok. 1 passed'");
        let early = format!("sleep 0.1; : > {file}; echo 'test result: ok. 1 passed'");
        let run = run(vec![order("b", &late, true), order("a", &early, false)], &quiet());
        assert!(run.success, "{run:?}");
    }
}
