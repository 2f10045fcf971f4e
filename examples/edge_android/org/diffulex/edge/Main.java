// SPDX-License-Identifier: Apache-2.0
package org.diffulex.edge;

import java.util.Arrays;

/** Answers one prompt: {@code Main BUNDLE THREADS ID...} */
public final class Main {
  private Main() {}

  public static void main(String[] words) {
    if (words.length < 3) {
      System.err.println("usage: org.diffulex.edge.Main BUNDLE THREADS ID...");
      System.exit(2);
    }
    try (EdgeSession session = new EdgeSession(words[0], Integer.parseInt(words[1]))) {
      int[] prompt =
          Arrays.stream(words).skip(2).mapToInt(Integer::parseInt).toArray();
      StringBuilder settled = new StringBuilder();
      int[] answer =
          session.generate(
              prompt,
              0,
              tokens -> {
                for (int token : tokens) {
                  settled.append(settled.length() == 0 ? "" : " ").append(token);
                }
                return true;
              });
      System.out.println(settled);
      System.exit(answer.length > 0 ? 0 : 1);
    } catch (IllegalArgumentException | IllegalStateException error) {
      System.err.println(error.getMessage());
      System.exit(error instanceof IllegalArgumentException ? 2 : 1);
    }
  }
}
