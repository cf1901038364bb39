//! One child process and the pauses between its starts. Nothing about A2A.

pub mod child;
pub mod output;
pub mod restart;
