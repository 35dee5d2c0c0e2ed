//! Test harness for programs that also play other roles, so that they cannot have the usual one. It runs tests
//! one after the other and reports as libtest does with `--report-time`.

use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::time::Instant;

/// Runs the tests whose names contain one of the words on the command line. Without words, runs all.
pub(crate) fn main(tests: &[(&str, fn())]) -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.iter().any(|word| word == "--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let wanted: Vec<&String> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let is_wanted =
        |name: &str| wanted.is_empty() || wanted.iter().any(|word| name.contains(word.as_str()));
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in tests.iter().filter(|(name, _)| is_wanted(name)) {
        println!("---- {name} stdout ----");
        let start = Instant::now();
        let ended = std::panic::catch_unwind(AssertUnwindSafe(test));
        let (count, verdict) =
            if ended.is_ok() { (&mut passed, "ok") } else { (&mut failed, "FAILED") };
        *count += 1;
        println!("test {name} ... {verdict} <{:.3}s>", start.elapsed().as_secs_f64());
    }
    let left_out = tests.len() - passed - failed;
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "test result: {verdict}. {passed} passed; {failed} failed; 0 ignored; 0 measured; \
         {left_out} filtered out"
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
