//! One macro for enums whose numbers come from a peer.

/// Declares an enum that stands for every value of an integer: the defined ones by name, the rest
/// as `Unknown(n)`. `from_raw` and `to_raw` are total and inverse to each other, so that no number
/// from the wire is lost or refused by accident.
macro_rules! enum_with_unknown {
    (
        $(#[$enum_doc:meta])*
        pub enum $name:ident($raw:ty) {
            $($(#[$doc:meta])* $variant:ident = $value:literal,)*
        }
    ) => {
        $(#[$enum_doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum $name {
            $($(#[$doc])* $variant,)*
            /// A number the interface does not define.
            Unknown($raw),
        }

        impl $name {
            /// Every defined value, in the order of the numbers.
            pub const DEFINED: &'static [$name] = &[$($name::$variant,)*];

            /// The value that stands for `raw`; total.
            #[inline]
            pub fn from_raw(raw: $raw) -> $name {
                match raw {
                    $($value => $name::$variant,)*
                    other => $name::Unknown(other),
                }
            }

            /// The number in the interface.
            #[inline]
            pub fn to_raw(self) -> $raw {
                match self {
                    $($name::$variant => $value,)*
                    $name::Unknown(other) => other,
                }
            }
        }
    };
}
pub(crate) use enum_with_unknown;
